#!/bin/sh
# Finds the servers that the demo and the tests start, and fetches those that are missing.
#
#   ./tools.sh            prints WALJET_PG_BIN=... and WALJET_NATS_SERVER=...: what is installed
#                         (PostgreSQL 14 and newer, nats-server 2.9 and newer), else the newest
#   ./tools.sh --pairs    the newest pair whatever is installed, and the oldest supported pair as
#                         WALJET_OLD_PG_BIN=... and WALJET_OLD_NATS_SERVER=...
#
# Use it as `export $(./tools.sh --pairs)`. It needs no root and no docker, and installs nothing:
# what it fetches goes to one folder, $WALJET_TOOLS, by default /var/cache/waljet for root, else
# waljet in $XDG_CACHE_HOME or ~/.cache. The builds come from PyPI, npm or the distribution, pinned
# by hash in tools/. They are third parties' builds: for tests and the demo, not for production.
#
#   WALJET_PG_BIN, WALJET_NATS_SERVER, WALJET_OLD_PG_BIN, WALJET_OLD_NATS_SERVER
#                         are used as they are, if they run
#   WALJET_IGNORE_INSTALLED=1
#                         passes over what is installed
set -eu
umask 022
unset CDPATH

here=$(cd "$(dirname "$0")" && pwd)
pins=$here/tools
uid=$(id -u)
stage=

say() { echo "tools: $*" >&2; }
die() {
    say "$*"
    exit 1
}

# --- What a server is -----------------------------------------------------------------------------

# version PROGRAM: prints its version, such as 18.6. Running it also shows that it fits the machine.
version() {
    [ -x "$1" ] && "$1" --version 2>/dev/null | sed 's/^[^0-9]*//; s/[^0-9.].*//' | grep .
}

# between VALUE LOW HIGH
between() { [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]; }

# is_postgres DIR LOW HIGH: both programs run and are of these major versions.
is_postgres() {
    pv=$(version "$1/postgres") && version "$1/initdb" >/dev/null && between "${pv%%.*}" "$2" "$3" && enterable "$1"
}

# is_nats PROGRAM LOW HIGH: with versions as 100 times the major plus the minor.
is_nats() {
    nv=$(version "$1") || return 1
    nminor=${nv#*.}
    between $((${nv%%.*} * 100 + ${nminor%%.*})) "$2" "$3" && enterable "$(dirname "$1")"
}

# enterable DIR: root's servers run as another user, who must be able to get there.
enterable() {
    [ "$uid" = 0 ] || return 0
    step=$(cd "$1" && pwd -P) || return 1
    while [ "$step" != / ]; do
        # The last of the nine letters of the mode is the others' right to enter.
        case $(ls -ld "$step") in ?????????[xt]*) ;; *) return 1 ;; esac
        step=$(dirname "$step")
    done
}

# --- What is there --------------------------------------------------------------------------------

# given NAME CHECK LOW HIGH: the value of the variable NAME, which has to be right.
given() {
    eval "given_value=\${$1:-}"
    [ -n "$given_value" ] || return 1
    case $given_value in /*) ;; *) die "$1 must be an absolute path, but is $given_value" ;; esac
    "$2" "$given_value" "$3" "$4" || die "$1=$given_value is no server that runs here$(reach_hint "$given_value")"
    echo "$given_value"
}

reach_hint() {
    [ "$uid" = 0 ] || return 0
    echo " (as root, servers run as postgres or nobody, who must be able to enter that folder)"
}

# postgres_there LOW HIGH: the newest PostgreSQL of these versions that is installed or was fetched.
postgres_there() {
    if [ -z "${WALJET_IGNORE_INSTALLED:-}" ]; then
        for dir in $(installed_postgres); do
            is_postgres "$dir" "$1" "$2" && { echo "$dir" && return 0; }
        done
    fi
    for dir in "$tools"/postgres-*/bin "$tools"/postgres-*/*/pginstall/bin "$tools"/postgres-*/native/bin \
        "$tools"/postgres-*/usr/lib/postgresql/*/bin; do
        is_postgres "$dir" "$1" "$2" && { echo "$dir" && return 0; }
    done
    return 1
}

# installed_postgres: folders, newest first.
installed_postgres() {
    for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
        major=${dir%/bin}
        major=${major##*[!0-9]}
        [ -d "$dir" ] && echo "${major:-0} $dir"
    done | sort -rn | sed 's/^[0-9]* //'
    on_path=$(command -v postgres) && dirname "$on_path"
    return 0
}

# nats_there LOW HIGH
nats_there() {
    if [ -z "${WALJET_IGNORE_INSTALLED:-}" ]; then
        for program in "$(command -v nats-server || :)" /usr/sbin/nats-server /opt/homebrew/bin/nats-server; do
            is_nats "$program" "$1" "$2" && { echo "$program" && return 0; }
        done
    fi
    for program in "$tools"/nats-*/bin/nats-server "$tools"/nats-*/usr/sbin/nats-server; do
        is_nats "$program" "$1" "$2" && { echo "$program" && return 0; }
    done
    return 1
}

# --- Fetching -------------------------------------------------------------------------------------

# Each way of fetching fills $stage, which is renamed when it is complete, so that an interrupted
# run leaves nothing half done.

begin() {
    mkdir -p "$tools" 2>/dev/null && [ -w "$tools" ] || die "cannot write to $tools; set WALJET_TOOLS to another folder"
    # One fetch at a time, where there is flock(1); elsewhere the rename settles it.
    if command -v flock >/dev/null; then
        exec 9>"$tools/.lock"
        flock 9
    fi
    # Here, because a subshell forgets the traps of its parent.
    trap drop_stage EXIT
    trap 'exit 130' HUP INT TERM
}

new_stage() {
    drop_stage
    stage=$tools/.stage.$$
    mkdir "$stage"
}

drop_stage() {
    [ -z "$stage" ] || rm -rf "$stage"
    stage=
}

# keep NAME [FOLDER]: makes what is in the stage permanent.
keep() {
    rm -rf "${tools:?}/$1"
    mv "${2:-$stage}" "$tools/$1"
    drop_stage
}

# pip ARGUMENT...: runs the pip that find_pip has found.
pip() {
    export PIP_USER=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    case $pip_from in
    python) python3 -m pip "$@" ;;
    program) pip3 "$@" ;;
    venv) "$tools/python/bin/python3" -m pip "$@" ;;
    apt) PYTHONPATH=$tools/pip/usr/lib/python3/dist-packages python3 -m pip "$@" ;;
    esac
}
pip_from=

# find_pip: looks for a pip, and gets one for a Python that came without.
find_pip() {
    command -v python3 >/dev/null || return 1
    [ -z "$pip_from" ] || return 0
    for pip_from in python program venv apt; do
        pip --version >/dev/null 2>&1 && return 0
    done
    # A virtual environment brings one, where its module is there. Such a folder should not be moved,
    # but its python3 and its pip work all the same.
    new_stage
    if python3 -m venv "$stage/python" >/dev/null 2>&1; then
        keep python "$stage/python"
    else
        from_apt python3-pip pip || :
    fi
    for pip_from in venv apt; do
        pip --version >/dev/null 2>&1 && return 0
    done
    pip_from=
    drop_stage
    return 1
}

# from_pip PINS NAME
from_pip() {
    find_pip || return 1
    new_stage
    pip install --quiet --no-deps --only-binary :all: --require-hashes --target "$stage" -r "$pins/$1" >&2 ||
        { drop_stage && return 1; }
    keep "$2"
}

# from_npm MAJOR NAME: PostgreSQL of a major version.
from_npm() {
    command -v npm >/dev/null || return 1
    new_stage
    cp "$pins/npm-$1/package.json" "$pins/npm-$1/package-lock.json" "$stage"
    # The package's own install script makes links of libraries; npm would ask before it runs any.
    (
        cd "$stage" &&
            npm_config_cache=$stage/cache npm_config_update_notifier=false \
                npm ci --ignore-scripts --no-audit --no-fund >/dev/null &&
            cd node_modules/postgres-*/ && node scripts/hydrate-symlinks.js >/dev/null
    ) || { drop_stage && return 1; }
    for package in "$stage"/node_modules/postgres-*/; do
        keep "$2" "${package%/}" && return 0
    done
}

# from_apt PACKAGE NAME: the distribution's package, unpacked beside the system.
from_apt() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    new_stage
    mkdir -p "$stage/root" "$stage/lists/partial" "$stage/cache/archives/partial"
    # First with the lists of packages that are there, then with lists of our own.
    sandbox="-o APT::Sandbox::User=$(id -un 2>/dev/null || id -u)"
    private="-o Dir::State::Lists=$stage/lists -o Dir::Cache=$stage/cache -o Debug::NoLocking=true"
    # shellcheck disable=SC2086 # several words each
    (
        cd "$stage" && {
            apt-get -qq $sandbox download "$1" ||
                { apt-get -qq $sandbox $private update && apt-get -qq $sandbox $private download "$1"; }
        } >/dev/null 2>&1 && dpkg -x "$1"_*.deb root
    ) || { drop_stage && return 1; }
    keep "$2" "$stage/root"
}

# --- What is wanted -------------------------------------------------------------------------------

# newest_postgres LOW: an installed or fetched one of at least this version, else the pinned one.
newest_postgres() {
    given WALJET_PG_BIN is_postgres 14 99 && return 0
    postgres_there "$1" 99 && return 0
    begin
    # Another run may have fetched it while we waited.
    postgres_there "$1" 99 && return 0
    say "fetching PostgreSQL 18 into $tools (14 MB)"
    from_pip postgres-newest.txt postgres-18-pip && postgres_there "$1" 99 && return 0
    from_npm 18 postgres-18-npm && postgres_there "$1" 99 && return 0
    [ "$1" -gt 15 ] || { from_apt postgresql-15 postgres-15-apt && postgres_there "$1" 99 && return 0; }
    cannot "PostgreSQL 18" WALJET_PG_BIN postgresql
}

# newest_nats LOW
newest_nats() {
    given WALJET_NATS_SERVER is_nats 209 999 && return 0
    nats_there "$1" 999 && return 0
    begin
    nats_there "$1" 999 && return 0
    say "fetching nats-server 2.15 into $tools (7 MB)"
    from_pip nats-newest.txt nats-2.15 && nats_there "$1" 999 && return 0
    [ "$1" -gt 209 ] || { from_apt nats-server nats-apt && nats_there "$1" 999 && return 0; }
    cannot "nats-server 2.15" WALJET_NATS_SERVER nats-server
}

oldest_postgres() {
    given WALJET_OLD_PG_BIN is_postgres 14 99 && return 0
    postgres_there 15 15 && return 0
    begin
    postgres_there 15 15 && return 0
    say "fetching PostgreSQL 15 into $tools (23 MB)"
    from_npm 15 postgres-15-npm && postgres_there 15 15 && return 0
    from_apt postgresql-15 postgres-15-apt && postgres_there 15 15 && return 0
    cannot "PostgreSQL 15" WALJET_OLD_PG_BIN postgresql-15
}

oldest_nats() {
    given WALJET_OLD_NATS_SERVER is_nats 209 999 && return 0
    nats_there 209 209 && return 0
    nats_there 210 210 && return 0
    begin
    nats_there 209 210 && return 0
    say "fetching nats-server 2.9 into $tools (4 MB)"
    from_apt nats-server nats-apt && nats_there 209 209 && return 0
    say "no nats-server 2.9 to be had here, fetching 2.10 instead"
    from_pip nats-oldest.txt nats-2.10 && nats_there 210 210 && return 0
    cannot "nats-server 2.10" WALJET_OLD_NATS_SERVER nats-server
}

# cannot WHAT VARIABLE PACKAGE: says what is missing on the machine, and ends.
cannot() {
    if find_pip || { [ "${3%%-*}" = postgresql ] && command -v npm >/dev/null; }; then
        say "fetching failed (see the lines above): is the package registry reachable?"
    elif command -v python3 >/dev/null; then
        say "python3 has no pip, which fetching needs (Debian: apt-get install python3-pip)"
    else
        say "there is no python3 with pip, which fetching needs (Debian: apt-get install python3-pip)"
    fi
    die "no $1: install it (Debian: apt-get install $3; macOS: brew install ${3%-15}) or set $2"
}

case ${1:-} in
'') pairs= ;;
--pairs) pairs=1 ;;
*)
    sed -n '2,/^set -eu/{/^#/s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
    ;;
esac

if [ -n "${WALJET_TOOLS:-}" ]; then
    tools=$WALJET_TOOLS
elif [ "$uid" = 0 ]; then
    tools=/var/cache/waljet
else
    tools=${XDG_CACHE_HOME:-${HOME:-/tmp/waljet-home-$uid}/.cache}/waljet
fi
case $tools in /*) ;; *) tools=$PWD/$tools ;; esac
# Fetched servers in a folder that their user cannot enter would look as if fetching had failed.
if [ "$uid" = 0 ]; then
    mkdir -p "$tools"
    enterable "$tools" || die "cannot use $tools$(reach_hint); set WALJET_TOOLS to another folder"
fi

# One after the other, and each in a subshell whose lock ends with it.
if [ -n "$pairs" ]; then
    pg=$(newest_postgres 18)
    nats=$(newest_nats 215)
    old_pg=$(oldest_postgres)
    old_nats=$(oldest_nats)
else
    pg=$(newest_postgres 14)
    nats=$(newest_nats 209)
fi
echo "WALJET_PG_BIN=$pg"
echo "WALJET_NATS_SERVER=$nats"
if [ -n "$pairs" ]; then
    echo "WALJET_OLD_PG_BIN=$old_pg"
    echo "WALJET_OLD_NATS_SERVER=$old_nats"
fi
