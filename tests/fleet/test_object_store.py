"""A fleet whose files are all in S3, played by a server of this process, survives the faults of a local one."""

import itertools
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import boto3
import pytest
from fleet.faults import (
    Faults,
    digest_of_fleet,
    driver,
    kill_driver,
    pack_here,
    run_driver,
    session_of,
    write_other_rows,
)
from moto.server import ThreadedMotoServer

from hf_packing.errors import PackingError
from hf_packing.fleet.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:(pack|exchange):UserWarning")

STAGES = ["count", "deal", "gather"]
NUMBERS = itertools.count()


class Server:
    """An S3 server, and a log of its requests."""

    def __init__(self):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.options = {"key": "key", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}
        self.requests = []
        self._app, self._server._server.app = self._server._server.app, self._logged

    def _logged(self, environ, start_response):
        known = {name: environ.get(f"HTTP_{name}", "") for name in ("IF_NONE_MATCH", "X_AMZ_COPY_SOURCE")}
        request = {"method": environ["REQUEST_METHOD"], "path": environ["PATH_INFO"], "query": environ["QUERY_STRING"]}

        def started(status, headers, *more):
            self.requests.append({**request, **known, "status": int(status.split()[0])})
            return start_response(status, headers, *more)

        return self._app(environ, started)

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
def client(server):
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def bucket(client, shards):
    """The name of a new bucket with the files to pack."""
    name = f"bucket-{next(NUMBERS)}"
    client.create_bucket(Bucket=name)
    for file in shards:
        client.upload_file(str(file), name, f"in/{file.name}")
    return name


def keys_in(client, bucket, prefix="out/"):
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {each["Key"]: each["LastModified"] for each in found}


def first_writes(requests, name):
    """Return the answers to all requests to write a file if there is none of its name."""
    return sorted(each["status"] for each in requests if each["IF_NONE_MATCH"] and each["path"].endswith(f"/{name}"))


def places(bucket):
    return f"s3://{bucket}/in/*.parquet", f"s3://{bucket}/out"


@pytest.mark.slow
def test_rows_and_requests(server, client, bucket, shards, digest, tmp_path):
    """Workers are killed in all stages; nothing is listed, copied or renamed, and owners are found by put-if-absent."""
    begin = len(server.requests)
    kills = [("count", 1, "unplaced"), ("deal", 2, "unplaced"), ("gather", 1, "half"), ("gather", 2, "begin")]
    faults = Faults(tmp_path / "faults", *[[*kill, "kill"] for kill in kills])
    done = run_driver(*places(bucket), faults, shards=4, storage_options=server.options)
    assert done[::2] == (0, "")
    assert digest_of_fleet(places(bucket)[1], server.options) == digest
    faults.assert_all_happened()
    pack_here(shards, tmp_path / "local")
    assert digest_of_fleet(tmp_path / "local") == digest

    requests = [each for each in server.requests[begin:] if each["path"].startswith(f"/{bucket}")]
    assert not any(each["X_AMZ_COPY_SOURCE"] for each in requests)
    missed = Counter(each["path"] for each in requests if (each["method"], each["status"]) == ("HEAD", 404))
    listed = [each["query"] for each in requests if "list-type" in each["query"] and "prefix=out" in each["query"]]
    # s3fs asks whether a missing object is a folder
    assert all("max-keys=1&" in query for query in listed)
    assert len(listed) <= missed.total()
    assert any("list-type" in each["query"] and "prefix=in" in each["query"] for each in requests)

    writes = [each for each in requests if each["method"] == "PUT" and each["path"].startswith(f"/{bucket}/out/")]
    first = {each["path"].rsplit("/", 1)[1] for each in writes if each["IF_NONE_MATCH"] == "*"}
    assert first == {"run.json", "plan", "manifest.json"}
    assert Counter(each["path"] for each in writes if each["path"].endswith(".parquet")).keys() == {
        f"/{bucket}/{key}" for key in keys_in(client, bucket) if key.endswith(".parquet")
    }
    assert {key.removeprefix("out/") for key in keys_in(client, bucket) if ".fleet" in key} == {".fleet/run.json"}


def test_put_if_absent(server, bucket):
    begin, barrier = len(server.requests), Barrier(8)

    def put(number):
        barrier.wait()
        return Store(f"s3://{bucket}/out", server.options).put_new("name", f"{number}".encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(put, range(8)))
    assert sum(won) == 1
    assert Store(f"s3://{bucket}/out", server.options).read("name") == f"{won.index(True)}".encode()
    assert first_writes(server.requests[begin:], "name") == [200] + 7 * [412]


def test_reads_after_the_end(server, bucket):
    store = Store(f"s3://{bucket}/out", server.options)
    store.put("three", b"abc")
    store.put("none", b"")
    parts = [store.read("three", *ends) for ends in [(0, 9), (1, 2), (3, 9), (7, 9), (2, 2)]]
    assert parts == [b"abc", b"b", b"", b"", b""]
    assert [store.read("none", *ends) for ends in [(0,), (0, 24), (5, 9)]] == [b"", b"", b""]
    for ends in [(0,), (0, 24), (5, 9)]:
        with pytest.raises(FileNotFoundError):
            store.read("missing", *ends)
    assert (store.size("three"), store.size("none"), store.size("missing")) == (3, 0, None)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_driver_killed_and_objects_damaged(stage, server, client, bucket, digest, tmp_path):
    faults = Faults(tmp_path / "faults", [stage, 2, "unplaced", "hold"])
    files, output = places(bucket)
    with driver(files, output, faults, shards=4, workers=1, storage_options=server.options) as process:
        faults.wait_for_hold(process)
        kill_driver(process)
        assert session_of(process.pid)
    kept = keys_in(client, bucket)
    names = ["count-00000", "count-00001", "plan", "before", "deal-00000", "deal-00001", "packed-00000", "inputs"]
    damaged = [key for key in kept if key.rsplit("/", 1)[1] in names]
    assert len(damaged) >= {"count": 3, "deal": 7, "gather": 8}[stage]
    for number, key in enumerate(damaged):
        content = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        client.put_object(Bucket=bucket, Key=key, Body=content[: (len(content) // 2) * (number % 2)])
    # an upload that was begun on a key is no object
    for name in (f"out/.fleet/{run_key(kept)}/deal-00003", f"out/packed-{run_key(kept)}-00003-of-00004.parquet"):
        upload = client.create_multipart_upload(Bucket=bucket, Key=name)["UploadId"]
        client.upload_part(Bucket=bucket, Key=name, PartNumber=1, UploadId=upload, Body=b"half of a file")
    code, _, errors = run_driver(files, output, faults, shards=4, storage_options=server.options)
    assert (code, errors) == (0, "")
    assert digest_of_fleet(output, server.options) == digest
    assert faults.tasks("begin").count((stage, 2)) == 2


def run_key(keys):
    (key,) = {key.split("/")[2] for key in keys if key.endswith("/inputs")}
    return key


@pytest.mark.slow
def test_two_drivers(server, bucket, digest, tmp_path):
    """Both count the last file at the same time, and then make the plan."""
    begin = len(server.requests)
    faults = Faults(tmp_path / "faults", *[["count", 5, "begin", "hold"]] * 2)
    files, output = places(bucket)
    known = {"shards": 4, "workers": 1, "storage_options": server.options}
    with driver(files, output, faults, **known) as first, driver(files, output, faults, **known) as second:
        faults.wait_for_hold(first)
        faults.release()
        ends = [process.communicate() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ends
    assert ends[0] == ends[1]
    assert digest_of_fleet(output, server.options) == digest
    assert len({pid for *_, pid in faults.lines("begin")}) > 3  # the workers of both
    for name in ("run.json", "plan", "manifest.json"):
        answers = first_writes(server.requests[begin:], name)
        assert answers in ([200], [200, 412]), (name, answers)


@pytest.mark.slow
def test_options_that_hold_options(server, bucket, digest):
    options = {**server.options, "client_kwargs": {"endpoint_url": server.options["endpoint_url"]}}
    options.pop("endpoint_url")
    assert run_driver(*places(bucket), shards=4, storage_options=options)[::2] == (0, "")
    assert digest_of_fleet(places(bucket)[1], options) == digest


def test_an_input_that_changed(server, client, bucket, tmp_path):
    """This process has listed the files, and asks again."""
    files, output = places(bucket)
    pack = {"storage_options": server.options, "shards": 2}
    first = pack_here(files, output, **pack)
    write_other_rows(tmp_path / "changed.parquet", tmp_path / "other")
    client.upload_file(str(tmp_path / "changed.parquet"), bucket, "in/1.parquet")
    with pytest.raises(PackingError, match=f"s3://{bucket}/in/1.parquet: expected the file that was packed"):
        pack_here(files, output, **pack)
    assert keys_in(client, bucket).keys() == {f"out/{file.name}" for file in first.files} | {
        "out/manifest.json",
        "out/.fleet/run.json",
    }
