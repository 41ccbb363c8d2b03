"""A fleet whose files are all in S3, played by a server of this process, survives the faults of a local one."""

import hashlib
import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from chat_templates import FROM_TRL, tokenizer_with
from fleet_files import STRATEGY, Here, Killed, Together, pack_here, write_files

import hf_packing as hfp
from hf_packing.cli import main
from hf_packing.fleet.manifest import file_system

boto3 = pytest.importorskip("boto3")
pytestmark = pytest.mark.filterwarnings("ignore:pack :UserWarning")

NUMBERS = itertools.count()


class Server:
    """An S3 server, and a list of the requests that put an object, with what they wait for."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.options = {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
        self.puts = []
        self._app, self._server._server.app = self._server._server.app, self._logged

    def _logged(self, environ, start_response):
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") > 1:
            self.puts.append((environ["PATH_INFO"], environ.get("HTTP_IF_NONE_MATCH")))
        return self._app(environ, start_response)

    def client(self):
        known = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.options["endpoint_url"], **known)

    def stop(self):
        self._server.stop()
        self._server._server.server_close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    files = write_files(folder / "in", (40, 3, 60))
    with pytest.warns(UserWarning, match="pack "):
        packed = pack_here(files, folder / "out")
    return files, {file.name: file.sha256 for file in packed.files}


class Bucket:
    def __init__(self, server, files):
        self.server, self.client, self.name = server, server.client(), f"bucket-{next(NUMBERS)}"
        self.client.create_bucket(Bucket=self.name)
        for file in files:
            self.client.upload_file(file, self.name, f"in/{file.rsplit('/', 1)[1]}")
        self.output = f"s3://{self.name}/out"

    def pack(self, executor=None, **settings):
        settings = {"executor": executor or Here(), "tasks": 3, "storage_options": self.server.options, **settings}
        return hfp.fleet.pack(f"s3://{self.name}/in/*.parquet", STRATEGY, self.output, **settings)

    def read(self, name):
        return self.client.get_object(Bucket=self.name, Key=f"out/{name}")["Body"].read()

    def write(self, key, content):
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def found(self):
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix="out/").get("Contents", [])
        return {each["Key"].removeprefix("out/") for each in listed}

    def check(self, expected):
        files = json.loads(self.read("manifest.json"))["files"]
        assert {file["name"]: file["sha256"] for file in files} == expected
        assert {name for name in self.found() if name.endswith(".parquet")} == set(expected)
        for name, digest in expected.items():
            assert hashlib.sha256(self.read(name)).hexdigest() == digest


@pytest.fixture
def bucket(server, local):
    return Bucket(server, local[0])


def test_files_are_those_of_a_local_run(bucket, local):
    packed = bucket.pack()
    bucket.check(local[1])
    assert packed.data_files == [f"s3://{bucket.name}/out/{name}" for name in local[1]]
    puts = [(path, match) for path, match in bucket.server.puts if path.startswith(f"/{bucket.name}/out/")]
    assert len(puts) == len(bucket.found()) == 8  # each in one piece
    assert {match for _, match in puts} == {"*"}  # and only where there was none
    bucket.pack()
    assert str(bucket.pack()) == str(packed)
    bucket.check(local[1])


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_dies_at_any_put_goes_on(server, local, monkeypatch, after):
    system, _ = file_system("s3://bucket", **server.options)
    put = system.put_file
    for number in (1, 2, 3, 8):  # run.json, the rows of a task, what is known of them, and the manifest
        bucket = Bucket(server, local[0])
        puts = []

        def dying(*arguments, puts=puts, number=number, **options):
            puts.append(arguments)
            if len(puts) == number and not after:
                raise Killed
            put(*arguments, **options)
            if len(puts) == number:
                raise Killed

        monkeypatch.setattr(system, "put_file", dying)
        with pytest.raises(Killed):
            bucket.pack()
        monkeypatch.setattr(system, "put_file", put)
        bucket.pack()
        bucket.check(local[1])


def test_two_drivers_at_once(bucket, local):
    executor = Together()
    with ThreadPoolExecutor(2) as threads:
        drivers = [threads.submit(bucket.pack, executor) for _ in range(2)]
        assert str(drivers[0].result()) == str(drivers[1].result())
    bucket.check(local[1])


def test_changed_and_damaged_files_are_refused_by_name(bucket, local):
    packed = bucket.pack()
    name = packed.files[1].name
    content = bucket.read(name)
    bucket.write(f"out/{name}", content[:-9] + b"x" + content[-8:])
    with pytest.raises(hfp.PackingError, match=f"output: .*s3://{bucket.name}/out/{name}.* is damaged"):
        bucket.pack()
    bucket.client.delete_object(Bucket=bucket.name, Key=f"out/{name}")
    bucket.pack()
    bucket.check(local[1])
    key = "in/2.parquet"
    bucket.write(key, bucket.client.get_object(Bucket=bucket.name, Key="in/0.parquet")["Body"].read())
    with pytest.raises(hfp.PackingError, match=f"output: .*s3://{bucket.name}/{key}"):
        bucket.pack()


def test_errors_of_texts_name_the_object(bucket):
    bucket.write("chats/a.jsonl", b'{"text": "one"}\n{"text": ')
    given = [f"s3://{bucket.name}/chats/*", STRATEGY, bucket.output]
    with pytest.raises(hfp.PackingError, match=f"s3://{bucket.name}/chats/a.jsonl, line 2: expected JSON"):
        hfp.fleet.pack(
            *given, executor=Here(), storage_options=bucket.server.options, tokenizer=tokenizer_with(FROM_TRL["qwen3"])
        )


@pytest.mark.slow
def test_the_command_and_its_processes(bucket, local, monkeypatch):
    for name, value in bucket.server.options.items():
        monkeypatch.setitem(fsspec.config.conf, "s3", {**fsspec.config.conf.get("s3", {}), name: value})
    given = ["pack", f"s3://{bucket.name}/in/*.parquet", "--max-length", "128", "--output", bucket.output]
    for task in (2, 3, 1):
        assert main([*given, "--task", f"{task}/3"]) == 0
    bucket.check(local[1])
    bucket.output += "-again"
    bucket.pack(executor=None, workers=2)
