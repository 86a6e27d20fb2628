#!/bin/sh
# Makes the secret files of compose.yaml in a folder, once: what is there stays. Usage: docker/secrets.sh [FOLDER]
#
# Without FOLDER it is SHARDLINE_SECRETS_DIR, of the environment or as Compose reads it from .env; else `secrets`.
# The folder is closed to other users of the host (0700). The files in it can be read by all: Compose mounts each one
# into containers as it is, and their users have other ids than yours.
set -eu

# Compose knows `export`, quotes, comments, CRLF, the home folder, and takes the last line.
of_env() {
  name='s/^ *\(export  *\)*SHARDLINE_SECRETS_DIR *[=:] *//p'
  line=$(tr -d '\r' <.env | sed -n "$name" | tail -n 1)
  case $line in
    \'*) printf '%s' "$line" | sed "s/^'\([^']*\)'.*/\1/" && return ;;
    \"*) line=$(printf '%s' "$line" | sed 's/^"\([^"]*\)".*/\1/') ;;
    *) line=$(printf '%s' "$line" | sed 's/ #.*//; s/ *$//') ;;
  esac
  case $line in
    '~/'*) line=$HOME/${line#'~/'} ;;
    '$HOME/'*) line=$HOME/${line#'$HOME/'} ;;
    '${HOME}/'*) line=$HOME/${line#'${HOME}/'} ;;
    *'$'*) echo "SHARDLINE_SECRETS_DIR in .env has a variable: run docker/secrets.sh FOLDER" >&2 && exit 2 ;;
  esac
  printf '%s' "$line"
}

folder=${1:-${SHARDLINE_SECRETS_DIR:-}}
if [ -z "$folder" ] && [ -f .env ]; then folder=$(of_env); fi
folder=${folder:-secrets}
umask 077
mkdir -p "$folder"
chmod 0700 "$folder"

# With the form that shared/shardline/contract/api_key.py gives keys: 64 public bits, then 256 secret ones.
api_key() {
  id=$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')
  secret=$(head -c 32 /dev/urandom | base64 | tr '+/' '-_' | tr -d '=\n')
  printf 'sk-shardline-%s-%s' "$id" "$secret"
}

random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }

write() {
  if [ -s "$folder/$1" ]; then
    echo "kept $folder/$1"
    return
  fi
  printf '%s' "$2" >"$folder/$1.new"
  chmod 0444 "$folder/$1.new"
  mv "$folder/$1.new" "$folder/$1"
  echo "made $folder/$1"
}

write postgres_password "$(random)"
write database_url "postgresql://shardline:$(cat "$folder/postgres_password")@postgres:5432/shardline"
write redis_acl "user default on >$(random) ~* &* +@all"
write redis_url "redis://:$(sed 's/.*>\([^ ]*\) .*/\1/' "$folder/redis_acl")@redis:6379/0"
write flower_auth "admin:$(random)"
write grafana_password "$(random)"
write api_key "$(api_key)"
write hop_secret_key "$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')"
