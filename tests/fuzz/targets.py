"""The fuzz targets: one function per file format, which takes the content of an untrusted file.

A target returns READ if the library reads the content and the result is consistent, and REFUSED if the library raises
the typed error that it documents. Any other exception is a bug. Targets correct the checksums, as the author of a
malicious file would; other tests check that wrong checksums are detected.

To add a format, add a function ``bytes -> str`` and its seeds (valid files) to ``TARGETS``. The folder
``corpus/<name>`` holds the cases that fuzzing found. The tests replay every file in it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile
from moe_comm.observe.records import ATTEMPTS, METRICS, RANKS, SPANS
from moe_comm.runtime.untrusted import parse_object
from moe_comm.train import config
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, load, restore_rng, rng_state
from moe_comm.train.data import SourceSpec, load_tokenizer, open_tokens
from moe_comm.train.data.sources import scan
from moe_comm.train.data.tokenfile import TokenFile, TokenWriter, _meta_sum
from tests.fuzz import records as run_records
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_json_lines
from tests.fuzz.rooms import READ, REFUSED, folder, refused

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Target:
    """run: see above. seeds: valid files. mutate: how to change one. needs: the optional package it needs, or ""."""

    name: str
    run: Callable[[bytes], str]
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, random.Random], bytes] = mutate_json
    needs: str = ""

    @property
    def corpus_files(self) -> list[Path]:
        """Return the files of the corpus."""
        return sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())


# --- configurations ---


def _load_config(path: Path | None, overrides: tuple[str, ...] = ()) -> str:
    try:
        loaded = config.load(path, overrides)
    except ConfigError as error:
        return refused(error)
    dumped = folder() / "again.toml"
    dumped.write_text(config.dump(loaded), encoding="utf-8")
    assert config.load(dumped) == loaded, "a dumped configuration does not load back unchanged"
    return READ


def config_toml(content: bytes) -> str:
    path = folder() / "config.toml"
    path.write_bytes(content)
    return _load_config(path)


def config_json(content: bytes) -> str:
    path = folder() / "config.json"
    path.write_bytes(content)
    return _load_config(path)


def overrides(content: bytes) -> str:
    """Load one override per line."""
    return _load_config(None, tuple(content.decode("utf-8", "surrogateescape").split("\n")))


def _config_seeds() -> list[bytes]:
    return [path.read_bytes() for path in config.ready_configs().values()]


def _json_config_seeds() -> list[bytes]:
    tree = config.load(None).model_dump(mode="json", exclude_none=True)
    return [json.dumps(tree).encode(), b"{}", b'{"optimizer": {"betas": [0.8, 0.9], "lr": 1}}']


def _override_seeds() -> list[bytes]:
    return [b'run.steps=5\nmodel.tie = true\ndata.source=["a", "b"]', b"optimizer.betas=[0.8, 0.99]\nrun.folder=x y"]


# --- checkpoints ---

ENTRIES = {
    "model/a": (2, 3),
    "model/scalar": (),
    "model/none": (0, 3),
}


@functools.cache
def checkpoint() -> Path:
    """Return a checkpoint whose files the targets replace one at a time."""
    entries = {
        name: Entry.whole(torch.arange(6.0)[: int(np.prod(shape))].view(shape)) for name, shape in ENTRIES.items()
    }
    with Checkpointer(folder() / "checkpoints") as checkpointer:
        checkpointer.save(3, entries, state={"note": [1, 2.5, "x"]}, rank_state={"seen": 5})
    return folder() / "checkpoints" / "step-00000003"


@functools.cache
def _original(name: str) -> bytes:
    return (checkpoint() / name).read_bytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sign(files: dict[str, bytes], manifest: bytes | None = None) -> Path:
    """Write the original checkpoint with ``files`` replaced, and with correct checksums in manifest and marker."""
    path = checkpoint()
    contents = {name: files.get(name, _original(name)) for name in ("metadata.json", "rank-00000.safetensors")}
    for name, content in contents.items():
        (path / name).write_bytes(content)
    if manifest is None:
        listed = {name: {"size": len(content), "sha256": _sha256(content)} for name, content in contents.items()}
        manifest = json.dumps({"version": 1, "files": listed}).encode()
    (path / "manifest.json").write_bytes(manifest)
    check = _sha256(f"1 {_sha256(manifest)} 1".encode())
    marker = {"version": 1, "manifest": _sha256(manifest), "sequence": 1, "check": check}
    (path / "COMPLETE").write_text(json.dumps(marker))
    return path


def _read_checkpoint(path: Path) -> str:
    """Open the checkpoint, read every tensor, and load those of ``ENTRIES``."""
    size = sum(file.stat().st_size for file in path.iterdir())
    try:
        reader = CheckpointReader(path)
        num_bytes = 0
        for name in reader.names:
            tensor = reader.read(name)
            assert tuple(tensor.shape) == reader.shape(name) and tensor.dtype == reader.dtype(name)
            num_bytes += tensor.nbytes
            assert num_bytes <= size, "the tensors are larger than the files"
        reader.verify()
    except CheckpointError as error:
        return refused(error)
    targets = {name: torch.full(shape, 99.0) for name, shape in ENTRIES.items()}
    try:
        load(path, {name: Entry.whole(tensor) for name, tensor in targets.items()}, allow_unused=True)
    except CheckpointError:
        assert all((tensor == 99).all() for tensor in targets.values()), "load raised an error but changed a tensor"
        return REFUSED
    return READ


def _restore(state: dict[str, Any]) -> str:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    try:
        restore_rng(state)
        random.random()
        random.gauss(0.0, 1.0)
        torch.rand(1)
    except CheckpointError:
        return REFUSED
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
    return READ


def marker(content: bytes) -> str:
    path = _sign({})
    (path / "COMPLETE").write_bytes(content)
    return _read_checkpoint(path)


def manifest(content: bytes) -> str:
    return _read_checkpoint(_sign({}, content))


def metadata(content: bytes) -> str:
    return _read_checkpoint(_sign({"metadata.json": content}))


def tensors(content: bytes) -> str:
    """Replace the tensor data. Another file holds the offsets, so any content of the correct length is valid."""
    return _read_checkpoint(_sign({"rank-00000.safetensors": content}))


def rng(content: bytes) -> str:
    try:
        return _restore(parse_object(content))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        return REFUSED


def _marker_seeds() -> list[bytes]:
    return [(_sign({}) / "COMPLETE").read_bytes()]


def _manifest_seeds() -> list[bytes]:
    return [(_sign({}) / "manifest.json").read_bytes()]


def _metadata_seeds() -> list[bytes]:
    return [_original("metadata.json")]


def _tensors_seeds() -> list[bytes]:
    return [_original("rank-00000.safetensors")]


def _rng_seeds() -> list[bytes]:
    return [json.dumps(rng_state()).encode()]


# --- token files and their sources ---


@functools.cache
def token_folder() -> Path:
    """Return the folder of a token file with three documents."""
    path = folder() / "tokens"
    (path / "tokenizer").mkdir(parents=True)
    writer = TokenWriter(path, 300)
    writer.append(np.array([5, 6, 256, 7, 256, 299, 256], np.uint32), np.array([3, 5, 7]))
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    writer.finish({"end_of_text": 256, "end_name": "e", "tokenizer": "made", "text_bytes": 4})
    return path


@functools.cache
def _token_original(name: str) -> bytes:
    return (token_folder() / name).read_bytes()


def _read_tokens() -> str:
    path = token_folder()
    try:
        for verify in ("touched", "all"):
            file: TokenFile = open_tokens(path, verify)  # type: ignore[arg-type]
            assert len(file) == len(file.tokens) <= (path / "tokens.bin").stat().st_size
            for start, stop in zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True):
                document = file.read(start, stop)
                assert ((document >= 0) & (document < file.vocab_size)).all()
            assert len(file.counts_V) == file.vocab_size
    except (ConfigError, CorruptFile) as error:
        return refused(error)
    return READ


def _restore_tokens(changed: dict[str, bytes]) -> None:
    for name in ("tokens.bin", "offsets.bin", "counts.bin"):
        (token_folder() / name).write_bytes(changed.get(name, _token_original(name)))


def tokens_meta(content: bytes) -> str:
    """Replace meta.json. If the content is a JSON object, its checksum is corrected."""
    _token_original("meta.json")  # reads it into the cache before it is replaced
    _restore_tokens({})
    try:
        meta = parse_object(content)
        meta["checksum"] = _meta_sum(meta)
        content = json.dumps(meta).encode()
    except ValueError:
        pass
    (token_folder() / "meta.json").write_bytes(content)
    return _read_tokens()


def _tokens_part(name: str, content: bytes) -> str:
    meta = json.loads(_token_original("meta.json"))
    _restore_tokens({name: content})
    sums = [hashlib.blake2b(content, digest_size=16).hexdigest()] if content else []
    meta["files"][name] = {"bytes": len(content), "blocks": sums}
    meta["checksum"] = _meta_sum(meta)
    (token_folder() / "meta.json").write_text(json.dumps(meta))
    return _read_tokens()


def _part_seeds(name: str) -> Callable[[], list[bytes]]:
    return lambda: [_token_original(name)]


def _read_source(name: str, kind: Any, content: bytes) -> tuple[str, str]:
    path = folder() / name
    path.write_bytes(content)
    try:
        text = "".join(part.text for part in scan(SourceSpec(str(path), format=kind)).parts())
    except ConfigError as error:
        return refused(error), ""
    text.encode()
    return READ, text


def jsonl(content: bytes) -> str:
    answer, text = _read_source("a.jsonl", "jsonl", content)
    assert len(text) <= len(content)
    return answer


def plain_text(content: bytes) -> str:
    answer, text = _read_source("a.txt", "text", content)
    assert answer == REFUSED or text.encode() == content
    return answer


def parquet(content: bytes) -> str:
    return _read_source("a.parquet", "parquet", content)[0]


def tokenizer(content: bytes) -> str:
    path = folder() / "tokenizer.json"
    path.write_bytes(content)
    try:
        loaded = load_tokenizer(path)
    except ConfigError as error:
        return refused(error)
    assert all(0 <= i < loaded.vocab_size for i in loaded.encode(["a word"])[0])
    return READ


def _parquet_seeds() -> list[bytes]:
    import pyarrow
    from pyarrow import parquet as library

    seeds = []
    for compression in ("none", "snappy"):
        out = io.BytesIO()
        table = pyarrow.table({"text": ["one", "", None, "two words"], "n": [1, 2, 3, 4]})
        library.write_table(table, out, compression=compression)
        seeds.append(out.getvalue())
    return seeds


def _tokenizer_seeds() -> list[bytes]:
    from moe_comm.train.data import ByteTokenizer

    ByteTokenizer().save(folder() / "bytes")
    return [(folder() / "bytes" / "tokenizer.json").read_bytes()]


TARGETS = {
    target.name: target
    for target in (
        Target("config_toml", config_toml, _config_seeds, mutate_bytes),
        Target("config_json", config_json, _json_config_seeds),
        Target("overrides", overrides, _override_seeds, mutate_bytes),
        Target("checkpoint_marker", marker, _marker_seeds),
        Target("checkpoint_manifest", manifest, _manifest_seeds),
        Target("checkpoint_metadata", metadata, _metadata_seeds),
        Target("checkpoint_tensors", tensors, _tensors_seeds, mutate_bytes),
        Target("checkpoint_rng", rng, _rng_seeds),
        Target("tokens_meta", tokens_meta, lambda: [_token_original("meta.json")]),
        Target("tokens_ids", functools.partial(_tokens_part, "tokens.bin"), _part_seeds("tokens.bin"), mutate_bytes),
        Target(
            "tokens_offsets", functools.partial(_tokens_part, "offsets.bin"), _part_seeds("offsets.bin"), mutate_bytes
        ),
        Target("tokens_counts", functools.partial(_tokens_part, "counts.bin"), _part_seeds("counts.bin"), mutate_bytes),
        Target("jsonl", jsonl, lambda: [b'{"text": "one"}\n\n{"text": "two", "n": 1}\n']),
        Target("text", plain_text, lambda: [b"plain\r\ntext \xc3\xa9\n"], mutate_bytes),
        Target("parquet", parquet, _parquet_seeds, mutate_bytes, needs="pyarrow"),
        Target("tokenizer", tokenizer, _tokenizer_seeds, needs="tokenizers"),
        Target("run_steps", run_records.rank_steps, run_records.seeds_of(RANKS), mutate_json_lines),
        Target("run_spans", run_records.spans, run_records.seeds_of(SPANS), mutate_json_lines, needs="perfetto"),
        Target("run_metrics", run_records.metrics, run_records.seeds_of(METRICS), mutate_json_lines),
        Target("run_attempts", run_records.attempts, run_records.seeds_of(ATTEMPTS), mutate_json_lines),
        Target("run_report", run_records.report, run_records.seeds_of(METRICS), mutate_json_lines, needs="plotly"),
        Target("event_region", run_records.events, run_records.event_seeds, mutate_bytes),
    )
}
