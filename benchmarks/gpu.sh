#!/usr/bin/env bash
# Check and measure on one NVIDIA GPU, without a network: bash benchmarks/gpu.sh [--help | options] [OUT]
# PYTHON=... chooses the interpreter.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.gpu.main "$@"
