"""``moe-comm serve``: requests of curl and of the openai client, several attention ranks, signals, ranks that die."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import psutil
import pytest

pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("openai", reason="needs the serve extra")

import openai
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from moe_comm import cli
from moe_comm.integrations.hugging_face.server import ModelServer
from moe_comm.integrations.serve_ranks import Balancer, serve_rank
from tests.integrations.models import VOCAB, load, save_model
from tests.pool import start_server

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }} {% endfor %}<|im_start|>assistant\n"
PROMPTS = ["w5 w6 w7", "w30", "w9 w8 w7 w6 w5", "w11 w12", "w40 w41 w42", "w50 w9"]
START_S, END_S = 120, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model that never ends by itself, with a tokenizer of words."""

    def endless(model: Any) -> None:
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None

    path = tmp_path_factory.mktemp("served")
    save_model("qwen3_moe", path, edit=endless, max_position_embeddings=100_000)
    words = {f"w{i}": i for i in range(VOCAB - 3)}
    words |= {"<|im_start|>user": VOCAB - 3, "<|im_start|>assistant": VOCAB - 2, "\n": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", chat_template=TEMPLATE).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(folder: str) -> Callable[[str, int], str]:
    """Return the greedy text of the unswapped model."""
    model, tokenizer = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    def text(prompt: str, length: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = model.generate(ids, do_sample=False, max_new_tokens=length)
        return str(tokenizer.decode(ids[0, len(prompt.split()) :]))

    return text


class Server:
    """A running ``moe-comm serve``."""

    def __init__(self, process: Any, output: TextIO) -> None:
        self.process, self.url, self.lines = process, "", list[str]()
        for line in output:
            self.lines.append(line)
            if found := re.match(r"Serving .* at (http\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=lambda: self.lines.extend(output), daemon=True)
        self._reader.start()

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Send a signal, and return the exit code and the output."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code, "".join(self.lines)

    def ranks(self) -> list[int]:
        """Return the processes of the ranks: they are forked from a child of the command."""
        children = psutil.Process(self.process.pid).children()
        return sorted(rank.pid for child in children for rank in child.children())

    def complete(self, folder: str, prompt: str, length: int, **more: Any) -> Any:
        """Return the answer to a request; a stream yields lines."""
        body = {"model": folder, "prompt": prompt, "max_tokens": length, "temperature": 0, **more}
        request = urllib.request.Request(f"{self.url}/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        answer = urllib.request.urlopen(request, timeout=END_S)
        return answer if more.get("stream") else json.load(answer)["choices"][0]["text"]

    def survives(self, rank: int, folder: str, prompt: str, length: int) -> str:
        """Kill a rank while the server answers a request, and return the whole answer."""
        lines = self.complete(folder, prompt, length, stream=True)
        texts: list[str] = []
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            texts += [one["text"] for one in json.loads(line[6:])["choices"]]
            if rank and len(texts) >= 5:
                os.kill(self.ranks()[rank], signal.SIGKILL)
                rank = 0
        assert not rank, texts
        return "".join(texts)


@contextmanager
def serve(folder: str, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "moe_comm", "serve", folder, "--port", "0", "--device", "cpu", *options]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Server(process, process.stdout)
        finally:
            if process.poll() is None:  # the test failed
                children = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                try:
                    process.wait(END_S)  # so that it removes its semaphores
                except subprocess.TimeoutExpired:
                    for child in children:
                        child.kill()
                    process.kill()


def test_one_attention_rank_answers_curl_and_the_openai_client_and_goes_on_without_the_expert_rank(
    folder: str, expected: Callable[[str, int], str]
) -> None:
    with serve(folder, "--attention", "1", "--experts", "1", "--recover") as server:
        body = {"model": folder, "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0}
        command = [
            "curl",
            "-s",
            f"{server.url}/completions",
            "-d",
            json.dumps(body),
            "-H",
            "content-type: application/json",
        ]
        answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=END_S).stdout)
        assert answer["choices"][0]["text"] == expected(PROMPTS[0], 6)
        with openai.OpenAI(base_url=server.url, api_key="none", timeout=END_S) as client:
            assert [model.id for model in client.models.list()] == [folder]
            chat: dict[str, Any] = {"model": folder, "max_tokens": 5, "temperature": 0}
            chat["messages"] = [{"role": "user", "content": PROMPTS[1]}]
            whole = client.chat.completions.create(**chat)
            chunks = list(client.chat.completions.create(**chat, stream=True))
            assert whole.usage is not None and whole.usage.completion_tokens == 5
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
            assert len(chunks) > 5
            with pytest.raises(openai.BadRequestError) as raised:
                client.completions.create(model="another", prompt="w1")
            assert folder in raised.value.response.text
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.complete(folder, "", 4)
        assert server.survives(1, folder, PROMPTS[2], 150) == expected(PROMPTS[2], 150)
        endless = server.complete(folder, PROMPTS[0], 50_000, stream=True)
        assert endless.readline().startswith(b"data: ")
        code, output = server.end(signal.SIGTERM)
        assert code == 0, output
        assert "serving goes on without rank 1" in output, output
        assert b'"finish_reason":"stop"' in endless.read()  # with the tokens so far


def run_rank(config: Any, output: Connection) -> None:
    """Run the only rank of a server."""
    os.dup2(output.fileno(), 1)
    assert serve_rank(config) == signal.SIGTERM


def test_a_server_with_offloaded_experts_answers_as_without(
    folder: str, expected: Callable[[str, int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Any] = []
    command = importlib.import_module("moe_comm.cli.serve")
    monkeypatch.setattr(command, "launch", lambda _, arguments, *__, **___: configs.extend(arguments) or [])
    options = ("--port", "0", "--device", "cpu", "--offload-budget", "64KiB", "--offload-path", str(tmp_path))
    assert cli.run(["serve", folder, *options]) == 0
    start_server()  # its processes have imported what a new one would load for seconds
    reading, writing = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=run_rank, args=(*configs, writing))
    process.start()
    writing.close()
    try:
        with os.fdopen(os.dup(reading.fileno())) as output:
            server = Server(process, output)
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda prompt: server.complete(folder, prompt, 6), PROMPTS[:2]))
            assert answers == [expected(prompt, 6) for prompt in PROMPTS[:2]]
            process.terminate()
            process.join(END_S)
            assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_requests_are_balanced_and_end_at_an_interrupt(folder: str, expected: Callable[[str, int], str]) -> None:
    options = ("--attention", "2", "--experts", "1", "--continuous-batching", "--kv-tokens", "4096")
    options += ("--micro-batches", "2")
    with serve(folder, *options) as server:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: server.complete(folder, prompt, 12), PROMPTS))
        assert answers == [expected(prompt, 12) for prompt in PROMPTS]
        # A micro-batch has 2048 tokens.
        for prompt, length, words in (("", 4, "no tokens"), ("w1", 2048, "space for 2048"), ("w5 " * 2048, 1, "2048")):
            for stream in (False, True):
                with pytest.raises(urllib.error.HTTPError, match="400") as refused:
                    server.complete(folder, prompt, length, stream=stream)
                assert words in json.load(refused.value)["detail"]
        assert len(server.complete(folder, "w5 " * 2046, 2).split()) == 2
        assert server.complete(folder, PROMPTS[0], 12) == answers[0]
        endless = server.complete(folder, PROMPTS[0], 2000, stream=True)
        assert endless.readline().startswith(b"data: ")
        code, output = server.end(signal.SIGINT)
        assert code == 128 + signal.SIGINT, output
        assert "Traceback" not in output, output


@pytest.mark.slow
def test_the_server_goes_on_without_ranks_with_experts_and_attention(
    folder: str, expected: Callable[[str, int], str]
) -> None:
    options = ("--attention", "2", "--experts", "2", "--recover", "--continuous-batching", "--kv-tokens", "4096")
    with serve(folder, *options) as server:
        ranks = server.ranks()
        assert server.survives(3, folder, PROMPTS[0], 150) == expected(PROMPTS[0], 150)
        attention = psutil.Process(ranks[1])
        attention.kill()
        attention.wait(END_S)
        assert [server.complete(folder, PROMPTS[1], 12) for _ in range(3)] == [expected(PROMPTS[1], 12)] * 3
        code, output = server.end(signal.SIGTERM)
        assert code == 0, output


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_server(folder: str) -> None:
    with serve(folder, "--attention", "2") as server:
        assert server.complete(folder, PROMPTS[0], 2)
        first, second = server.ranks()
        os.kill(second, signal.SIGKILL)
        code, output = server.end()
        assert code == 1, output
        assert "moe-comm: error: rank 1" in output and "SIGKILL" in output, output
        assert not psutil.pid_exists(first)


def test_an_address_in_use_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert cli.run(["serve", folder, "--port", str(taken.getsockname()[1]), "--device", "cpu"]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert cli.run(["serve", folder]) == 2
    assert "'.[serve]'" in capsys.readouterr().err


def test_a_manager_that_has_failed_ends_the_server_with_its_error() -> None:
    server = object.__new__(ModelServer)  # only the servers of a model have managers, which requests cannot break
    server._managers = [SimpleNamespace(background_thread_status=SimpleNamespace(fatal_error=OSError("no cache")))]
    assert server.ended.endswith("OSError: no cache")


def test_transformers_has_what_the_server_uses() -> None:
    """A failure here means that ``hugging_face/server.py`` must follow a change of transformers."""
    options = {"force_model", "non_blocking", "continuous_batching", "cb_num_blocks", "cb_max_batch_tokens"}
    assert options <= inspect.signature(Serve).parameters.keys()
    source = inspect.getsource(Serve.__init__)
    assert "from .serving.model_manager import ModelManager" in source  # the class that is replaced
    assert "self.start_server()" in source and "self.server = uvicorn.Server" in source
    assert "self._thread" in inspect.getsource(Serve.kill_server)
    manager = inspect.getsource(ModelManager)
    assert {"load_model_and_processor", "get_gen_models", "process_model_name", "__init__"} <= vars(ModelManager).keys()
    assert manager.count("self.load_model_and_processor") == 2  # of the preloaded model, and /load_model


def test_connections_go_to_the_server_with_the_fewest() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: bytes) -> None:
        with closing(writer):
            writer.write(name)
            await reader.read(1)

    async def talk() -> list[bytes]:
        servers = [await asyncio.start_server(partial(answer, name=name), "127.0.0.1", 0) for name in (b"a", b"b")]
        listening = socket.create_server(("127.0.0.1", 0))
        ports = [one.sockets[0].getsockname()[1] for one in servers]
        names: list[bytes] = []
        with closing(Balancer(listening, ports)):

            async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                names.append(await reader.readexactly(1))
                return reader, writer

            opened = [await connect() for _ in range(4)]
            for reader, writer in opened[::2]:
                writer.write(b".")
                assert await reader.read() == b""  # the server has closed it
            opened += [await connect() for _ in range(2)]
            for _, writer in opened:
                writer.close()
                await writer.wait_closed()
        return names

    assert asyncio.run(talk()) == [b"a", b"b", b"a", b"b", b"a", b"a"]
