#!/usr/bin/env bash
exec python3 -B tests/tools/check_layers_test.py
