#!/usr/bin/env bash
# Serve the tiny model with a real vLLM on the CPU, on 127.0.0.1. It is ready when GET /health answers 200, after 25 to 70 s.
#
# usage: tools/serve_vllm.sh PORT [vllm serve flags...]      the log goes to stderr; Ctrl-C ends it
#
# A pool small enough to thrash: tools/serve_vllm.sh 8000 --num-gpu-blocks-override 256 --max-num-seqs 32
# On the CPU a block holds 128 tokens, so this pool holds 255 x 128 tokens (vLLM keeps one block back).
set -euo pipefail
if [[ ! ${1:-} =~ ^[0-9]+$ ]]; then
  echo "usage: $0 PORT [vllm serve flags...]" >&2
  exit 2
fi
port=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/install_vllm.sh")
model=${KVWATCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvwatch}/tiny-llama

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB; --num-gpu-blocks-override overrides what follows from it
export VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tiny model gains nothing from more
# The worker computes in the engine's process, as it does with one GPU. Else each of the two spins while it waits for the
# other, and they take both CPUs of a small machine from the API server and the clients.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# The distribution is called vllm-cpu, so the `vllm` command does not find its own version: start the module.
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name tiny-llama \
  --load-format dummy --dtype bfloat16 --enforce-eager --host 127.0.0.1 --port "$port" --max-model-len 4096 "$@" >&2
