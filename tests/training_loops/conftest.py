"""Ranks of these tests import transformers, offline."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
