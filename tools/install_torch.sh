#!/usr/bin/env bash
# Installs torch into the Python given as $1: the CPU build where no GPU is found, since the CUDA one costs gigabytes.
set -euo pipefail
python=${1:?usage: install_torch.sh PYTHON}
version=${TORCH_VERSION:-2.13.0}
pip() { "$python" -m pip install --quiet "$@"; }

"$python" -c 'import torch' 2>/dev/null && exit 0
if [ "$(uname -s)" = Linux ] && ! [ -e /dev/nvidiactl ] && ! [ -e /dev/kfd ]; then
  # the first finds the CPU build where pip is configured to see it, the second knows where it is published
  pip "torch==$version+cpu" 2>/dev/null && exit 0
  if pip uv && "$python" -m uv pip install --quiet --python "$python" --torch-backend cpu "torch==$version" 2>/dev/null; then
    exit 0
  fi
fi
pip "torch==$version"
