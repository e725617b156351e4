#!/usr/bin/env bash
# Install the real components that the tests run against, on Debian 12 as root. What is there already is left alone.
#
# usage: tools/install_parts.sh
#
# Prometheus, Alertmanager, VictoriaMetrics and Chromium come from Debian, vLLM and the tiny model from install_vllm.sh.
# The tests start them on free ports of 127.0.0.1; a service that Debian starts on its own is not used. A second
# Prometheus, of a release >= 3, is fetched where it can be had (fetch_prometheus_3.sh).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

missing=()
need() { # need PACKAGE PROGRAM
  command -v "$2" >/dev/null || missing+=("$1")
}
need prometheus prometheus
need prometheus promtool
need prometheus-alertmanager prometheus-alertmanager
need victoria-metrics victoria-metrics
need chromium chromium
"${PYTHON:-python3}" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)

if ((${#missing[@]})); then
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]}; install them, or run this on Debian as root" >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

"$here/fetch_prometheus_3.sh" || true # it said why; the tests run with the one on PATH

"$here/install_vllm.sh"
