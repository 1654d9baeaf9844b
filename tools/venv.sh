#!/bin/sh
# The virtual environment of this project, with uv where it is installed and with venv and pip where it is not.
#   tools/venv.sh make DIRECTORY
#   tools/venv.sh install DIRECTORY [EXTRA...]
set -eu

verb=$1
venv=$2
shift 2

has_uv() { command -v uv >/dev/null 2>&1; }

find_python() {
    for python in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        # Asked, not trusted: a launcher of that name may stand for nothing.
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "Python 3.11, 3.12 or 3.13 with its venv module is needed: install one, or name it with PYTHON=/path/to/python3." >&2
    exit 1
}

case $verb in
make)
    rm -rf "$venv"
    if has_uv; then
        uv venv --quiet --python "${PYTHON:->=3.11,<3.14}" "$venv"
    else
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    ;;
install)
    # Empty extras fall out here: no build of MLX has to be named on macOS.
    extras=$(echo "$*" | tr -s ' ' ',' | sed 's/^,//; s/,$//')
    what=.${extras:+"[$extras]"}
    if has_uv; then
        uv pip install --quiet --python "$venv/bin/python" --editable "$what"
    else
        "$venv/bin/python" -m pip install --quiet --editable "$what"
    fi
    ;;
*)
    echo "usage: tools/venv.sh make|install DIRECTORY [EXTRA...]" >&2
    exit 2
    ;;
esac
