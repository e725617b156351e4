#!/usr/bin/env bash
# Fetch promtool and prometheus of a release >= 3, which the tests use beside those on PATH (2.42 on Debian 12).
#
# usage: tools/fetch_prometheus_3.sh      exit 1 and the reason where they cannot be had
#
# A range of Prometheus 3 leaves out the sample at its beginning, so the same rule can be judged otherwise. Debian testing
# has them. Its packages are fetched by an apt with folders and sources of its own, checked with Debian's keys, and
# unpacked: nothing is installed, and no setting of this machine changes.
#
# KVWATCH_PROMETHEUS_3   a folder that has both programs already; nothing is fetched then
# KVWATCH_CACHE          where they go, in a folder prometheus-3; 200 MB    ($XDG_CACHE_HOME/kvwatch or ~/.cache/kvwatch)
set -euo pipefail
programs=(promtool prometheus)
cache=${KVWATCH_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/kvwatch}
folder=${KVWATCH_PROMETHEUS_3:-$cache/prometheus-3}
keys=/usr/share/keyrings/debian-archive-keyring.gpg

give_up() { # give_up REASON
  echo "no Prometheus >= 3: $1" >&2
  echo "the tests run without it; to have it, put ${programs[*]} of such a release into a folder and name that folder" \
    "in KVWATCH_PROMETHEUS_3" >&2
  exit 1
}

release_of() { # release_of PROGRAM: 3.5.3, or nothing where it is missing or does not run
  "$1" --version 2>&1 | sed -n '1s/.*, version \([0-9][0-9.]*\).*/\1/p' || true
}

complete() { # complete FOLDER: whether all programs in it are of a release >= 3
  local program release
  for program in "${programs[@]}"; do
    release=$(release_of "$1/$program")
    [[ ${release%%.*} -ge 3 ]] || return 1
  done
}

if complete "$folder"; then
  echo "Prometheus $(release_of "$folder/promtool") is in $folder"
  exit
fi
[[ -z ${KVWATCH_PROMETHEUS_3:-} ]] || give_up "KVWATCH_PROMETHEUS_3=$folder does not hold ${programs[*]} that run"
for need in apt-get dpkg-deb; do
  command -v "$need" >/dev/null || give_up "$need is missing, so Debian's packages cannot be fetched"
done
[[ -r $keys ]] || give_up "$keys is missing, so Debian's packages cannot be checked"

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
cd "$temporary"
mkdir -p lists/partial cache/archives/partial unpacked none
# The mirror that this machine uses for Debian, if it uses one.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1) || true
echo "deb [signed-by=$keys target=Packages] ${mirror:-http://deb.debian.org/debian/} testing main" >sources.list

own=(
  Dir::Etc::SourceList="$PWD/sources.list" Dir::Etc::SourceParts="$PWD/none"
  Dir::Etc::Preferences=/dev/null Dir::Etc::PreferencesParts="$PWD/none"
  Dir::State::Lists="$PWD/lists" Dir::State::Status=/dev/null Dir::Cache="$PWD/cache"
  APT::Sandbox::User=root # as its user _apt it may not enter this folder
  Acquire::Languages=none Acquire::Retries=1 Acquire::http::Timeout=30
)
apt() {
  apt-get -q "${own[@]/#/-o}" "$@" >>log 2>&1
}

if ! apt update || ! apt download "${programs[@]}"; then
  give_up "Debian testing's packages were not to be had: $(grep -E '^ *(Err:|E:)' log | head -n 2 || true)"
fi
for package in ./*.deb; do
  dpkg-deb -x "$package" unpacked
done
complete unpacked/usr/bin || give_up "$(ls ./*.deb) do not run here or are older"
mkdir -p "$folder"
for program in "${programs[@]}"; do
  mv "unpacked/usr/bin/$program" "$folder/"
done
echo "Prometheus $(release_of "$folder/promtool") is in $folder now"
