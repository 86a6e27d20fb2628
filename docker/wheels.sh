#!/bin/sh
# Fills a folder with every wheel that the images need, for docker/compose.wheels.yaml. Run it where a package index is,
# with the images' version of Python. Usage: docker/wheels.sh FOLDER [arguments of pip download]
# Such as --extra-index-url and the address of PyTorch's CPU builds: without them torch and CUDA take gigabytes.
set -eu
folder=${1:?usage: docker/wheels.sh FOLDER [arguments of pip download]}
shift
cd "$(dirname "$0")/.."
# async-timeout: redis wants it on Python 3.11.0 to 3.11.2, which the base image may have and this Python may not be.
${PYTHON:-python3} -m pip download -q -d "$folder" -c constraints.txt "$@" \
  '.[cli,flower,gateway,migrate,relay,stage]' setuptools async-timeout
