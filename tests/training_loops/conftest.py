"""Ranks of these tests import transformers, offline."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
