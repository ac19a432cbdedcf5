# Sourced by scripts/quickstart and scripts/test. `bootstrap [--dev] [--skip-doctor]` makes .venv and installs recsys into
# it, from nothing but a Python >= 3.10, and sets `bootstrapped`; when a stamp says that this is done for the current files
# it returns at once.

bootstrap() {
    local stamp_file=.venv/.recsys-stamp stamp
    if [ ! -x .venv/bin/python ]; then
        make_venv
    fi
    stamp="$(current_stamp)"
    case "$(cat "$stamp_file" 2>/dev/null || true)" in
        "$stamp --dev") return 0 ;;
        "$stamp ${1:-}") return 0 ;;
    esac
    rm -f "$stamp_file"
    .venv/bin/python scripts/install.py "$@"
    echo "$stamp ${1:-}" >"$stamp_file"
    bootstrapped=yes
}

make_venv() {
    local python
    for python in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            echo "+ $python -m venv .venv"
            if "$python" -m venv .venv; then
                # The pip that comes with a Python may be years old. It takes twice as long to choose the versions.
                .venv/bin/python -m pip install -q --upgrade pip || true
                return 0
            fi
            rm -rf .venv
            echo "$python could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
            exit 5
        fi
    done
    echo "No Python >= 3.10 on PATH (python3 is $(python3 --version 2>&1 || true)); install one and run this again" >&2
    exit 5
}

# Changes with the Python and with each file that decides what an install does.
current_stamp() {
    .venv/bin/python --version
    cat pyproject.toml protos/*.proto recsys/environment.py recsys/install.py scripts/install.py \
        scripts/build_backend.py scripts/compile_protos.py | cksum
}
