from pathlib import Path
from typing import Any

import pytest

from kvwatch.errors import SettingError, SourceError
from kvwatch.simulation import CostModel, KvGroup, Request, Retry, SchedulerSettings
from kvwatch.simulator import simulate
from kvwatch.sources.workload_files import read_request_log, read_requests, read_workload
from kvwatch.workload_spec import workload_from

ENGINE: dict[str, Any] = {
    "vllm_version": "0.32.0",
    "num_gpu_blocks": 2048,
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 32,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "enable_prefix_caching": False,
}
COST = {"step_seconds": 0.02, "per_token_seconds": 1.0e-5, "per_kv_token_seconds": 1.0e-8}
REQUESTS: list[dict[str, Any]] = [
    {"at_seconds": 0.0, "prompt_tokens": 900, "output_tokens": 700},
    {"at_seconds": 1.5, "prompt_tokens": 1200, "output_tokens": 300, "prefix": "support", "prefix_tokens": 512},
]
BOMB: Any = ["x"]  # ten levels of ten aliases, as YAML reads them
for _ in range(10):
    BOMB = [BOMB] * 10
WHOLE: dict[str, Any] = {"engine": ENGINE, "cost": COST, "clients": 28, "requests": REQUESTS}


def test_a_whole_mapping_becomes_a_workload() -> None:
    workload = workload_from(WHOLE)
    assert workload.engine == SchedulerSettings(
        num_gpu_blocks=2048, max_num_seqs=32, max_num_batched_tokens=2048, enable_prefix_caching=False
    )
    assert workload.cost == CostModel(step_seconds=0.02, per_token_seconds=1e-5, per_kv_token_seconds=1e-8)
    assert workload.requests[1] == Request(
        at_seconds=1.5, prompt_tokens=1200, output_tokens=300, prefix="support", prefix_tokens=512
    )
    assert (workload.clients, workload.vllm_version, workload.retry) == (28, "0.32.0", None)


def test_without_max_model_len_no_request_is_too_long() -> None:
    engine = {name: value for name, value in ENGINE.items() if name != "max_model_len"}
    workload = workload_from(WHOLE | {"engine": engine, "requests": [{"prompt_tokens": 9000, "output_tokens": 1000}]})
    assert workload.engine.max_model_len == 10_000
    assert simulate(workload.engine, workload.cost, workload.requests).output_tokens == 1000


def test_groups_and_retries_are_read_as_well() -> None:
    engine = ENGINE | {"groups": [{"block_size": 16}, {"block_size": 16, "window_tokens": 1024}]}
    retry = {"first_token_timeout_seconds": 30, "max_attempts": 3, "backoff_seconds": 1}
    workload = workload_from(WHOLE | {"engine": engine, "retry": retry})
    assert workload.engine.groups == (KvGroup(block_size=16), KvGroup(block_size=16, window_tokens=1024))
    assert workload.retry == Retry(first_token_timeout_seconds=30, max_attempts=3, backoff_seconds=1)


@pytest.mark.parametrize(
    ("version", "reserves", "evicts_unhashed_first"),
    [("0.18.0", False, False), ("0.19.0", True, False), ("0.22.0", True, False), ("0.23.0", True, True)],
)
def test_the_version_settles_what_is_no_flag_yet(version: str, reserves: bool, evicts_unhashed_first: bool) -> None:
    engine = {name: ENGINE[name] for name in ("num_gpu_blocks", "max_model_len")} | {"vllm_version": version}
    settings = workload_from(WHOLE | {"engine": engine}).engine
    assert settings.scheduler_reserve_full_isl == reserves
    assert settings.evict_unhashed_first == evicts_unhashed_first


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"clinets": 3}, "the workload has the unknown key 'clinets'; known are engine, cost, clients"),
        ({"engine": ENGINE | {"max_seqs": 3}}, "engine has the unknown key 'max_seqs'"),
        ({"engine": ENGINE | {"evict_unhashed_first": True}}, "unknown key 'evict_unhashed_first'"),
        ({"engine": ENGINE | {"max_num_seqs": 1.5}}, "engine.max_num_seqs is 1.5; it must be a whole number"),
        ({"engine": ENGINE | {"max_num_seqs": True}}, "engine.max_num_seqs is True; it must be a whole number"),
        ({"engine": ENGINE | {"max_num_seqs": -1}}, "max_num_seqs is -1; it must be a finite number of at least 1"),
        ({"engine": ENGINE | {"enable_prefix_caching": "no"}}, "engine.enable_prefix_caching is 'no'; it must be true"),
        ({"engine": ENGINE | {"watermark": 1.5}}, "0 <= watermark < 1"),
        ({"engine": ENGINE | {"vllm_version": 0.32}}, "engine.vllm_version is 0.32; write it in quotes"),
        ({"engine": ENGINE | {"vllm_version": "0.7.3"}}, "models the V1 scheduler"),
        (
            {"engine": ENGINE | {"vllm_version": "0.23.0", "watermark": 0.05}},
            "engine.watermark is set, and vLLM 0.23.0 has no --watermark: it came with 0.24.0",
        ),
        (
            {"engine": ENGINE | {"vllm_version": "0.30.0", "max_num_active_seqs": 5}},
            "vLLM 0.30.0 has no --max-num-active-seqs: it came with 0.31.0",
        ),
        ({"engine": ENGINE | {"groups": [{"blocks": 3}]}}, "engine.groups[0] has the unknown key 'blocks'"),
        (
            {"engine": ENGINE | {"groups": 3}},
            "engine.groups is 3; it must be a list of {block_size, window_tokens",
        ),
        ({"engine": {"max_num_seqs": 3}}, "engine has no num_gpu_blocks, which must be given"),
        ({"engine": None}, "engine is missing; it must be a mapping with vllm_version"),
        ({"cost": {"per_token_seconds": 1.0}}, "cost has no step_seconds"),
        (
            {"cost": {"step_seconds": "1e-5"}},
            "cost.step_seconds is '1e-5'; it must be a number. YAML reads 1e-5 as text",
        ),
        ({"cost": {"step_seconds": -1.0}}, "cost: step_seconds is -1.0"),
        ({"clients": 0}, "clients is 0; it must be a whole number of at least 1"),
        ({"clients": "many"}, "clients is 'many'"),
        ({"requests": None}, "requests is missing"),
        ({"requests": []}, "no requests"),
        ({"requests": [[1, 2]]}, "requests[0] is [1, 2]; it must be a mapping"),
        ({"requests": [*REQUESTS, {"prompt_tokens": 5}]}, "requests[2] has no output_tokens"),
        ({"requests": [{"prompt_tokens": 5, "output_tokens": 0}]}, "requests[0]: output_tokens is 0"),
        ({"requests": [REQUESTS[0] | {"prefix": "p"}]}, "requests[0] names the prefix 'p' but not how many tokens"),
        ({"requests": [REQUESTS[0] | {"prefix": 7}]}, "requests[0].prefix is 7; it must be text"),
        ({"requests": [REQUESTS[0] | {"at_seconds": -1}]}, "requests[0]: at_seconds is -1"),
        ({"requests": [REQUESTS[0] | {"at_seconds": 10**400}]}, "requests[0]: at_seconds is above 1,000,000,000,000"),
        ({"requests": [{"prompt_tokens": 10**11, "output_tokens": 1}]}, "prompt_tokens is above 100,000,000"),
        ({"engine": ENGINE | {"num_gpu_blocks": 10**30}}, "engine: num_gpu_blocks is above 1,000,000,000,000,000"),
        ({"cost": {"step_seconds": 10**400}}, "cost: step_seconds is above"),
        ({"requests": BOMB}, "requests[0] is [[[...], [...]"),
        (
            {"requests": [{"prompt_tokens": 4000, "output_tokens": 200}]},
            "request 0 has 4000 prompt and 200 output tokens, together 4200, more than max_model_len 4096: vLLM",
        ),
        (
            {"engine": ENGINE | {"num_gpu_blocks": 50}},
            "request 0 needs 100 blocks for its 1600 tokens, and the pool has 49 (50 minus the null block): vLLM would",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as refused:
        workload_from(WHOLE | changes)
    assert text in str(refused.value)


# ---- files ----------------------------------------------------------------------------------------------------------

YAML = """
engine: {num_gpu_blocks: 200, max_num_seqs: 8, enable_prefix_caching: false}
cost: {step_seconds: 0.02, per_token_seconds: 1.0e-5}
"""


def test_a_yaml_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(YAML + "requests:\n  - {prompt_tokens: 10, output_tokens: 5}\n")
    assert read_workload(str(file), notes=[]).requests == (Request(prompt_tokens=10, output_tokens=5),)


def test_requests_may_stand_in_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(YAML + "requests_file: r.jsonl\n")
    (tmp_path / "r.jsonl").write_text(
        '{"prompt_tokens": 10, "output_tokens": 5}\n\n{"prompt_tokens": 3, "output_tokens": 1}\n'
    )
    assert [r.prompt_tokens for r in read_workload(str(tmp_path / "load.yaml"), notes=[]).requests] == [10, 3]


def test_an_error_in_a_list_of_requests_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt_tokens": 10, "output_tokens": 5}\n{"prompt_tokens": 10,\n')
    with pytest.raises(SettingError, match=r"r\.jsonl:2 is not JSON"):
        read_requests(file)
    file.write_text('{"prompt_tokens": 10, "output_tokens": "5"}\n')
    with pytest.raises(SettingError, match=r"r\.jsonl:1\.output_tokens is '5'; it must be a whole number"):
        read_requests(file)


# The columns of Azure's LLM inference trace, of BurstGPT, and of a gateway that keeps the OpenAI `usage` object.
LOGS = {
    "azure.csv": """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
""",
    "burst.csv": """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,4808,10,4818,Conversation log
5.052,GPT-4,3180,8,3188,API log
""",
    "gateway.jsonl": """
{"start_time": "2025-01-01T00:00:00.052Z", "usage": {"prompt_tokens": 3180, "completion_tokens": 8}}
{"start_time": "2025-01-01T00:00:00Z", "usage": {"prompt_tokens": 4808, "completion_tokens": 10}}
""",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_request_log_is_read_in_its_own_columns(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LOGS[name])
    assert read_request_log(tmp_path / name, notes=[]) == (
        Request(at_seconds=0.0, prompt_tokens=4808, output_tokens=10),
        Request(at_seconds=0.052, prompt_tokens=3180, output_tokens=8),
    )


def test_requests_without_output_are_left_out_of_a_log_and_noted(tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(YAML + "request_log: log.csv\n")
    (tmp_path / "log.csv").write_text("timestamp,prompt_tokens,completion_tokens\n1700000000,50,0\n1700000003,60,4\n")
    notes: list[str] = []
    workload = read_workload(str(tmp_path / "load.yaml"), notes=notes)
    assert workload.requests == (Request(prompt_tokens=60, output_tokens=4),)
    assert notes == [f"{tmp_path / 'log.csv'}: 1 of 2 requests left out, they have no output tokens"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time,prompt_tokens\n1,2\n", "log.csv:2 has none of output_tokens, completion_tokens"),
        ("time,prompt_tokens,output_tokens\nsoon,2,3\n", "'soon' is neither a number of seconds nor an ISO 8601 time"),
        ("time,prompt_tokens,output_tokens\n1,-2,3\n", "log.csv:2: '-2' is not a number of tokens"),
        ("time,prompt_tokens,output_tokens\n1,many,3\n", "log.csv:2: 'many' is not a number of tokens"),
    ],
)
def test_a_log_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(SettingError) as refused:
        read_request_log(tmp_path / "log.csv", notes=[])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"time": [], "prompt_tokens": 5, "output_tokens": 5}', "'[]' is neither a number of seconds nor"),
        ('{"time": 1, "prompt_tokens": {}, "output_tokens": 5}', "log.jsonl:1: {} is not a number of tokens"),
        ('{"time": 1, "prompt_tokens": Infinity, "output_tokens": 5}', "inf is not a number of tokens"),
        ('{"time": NaN, "prompt_tokens": 5, "output_tokens": 5}', "log.jsonl:1: nan is not a time"),
        (f'{{"time": 1{"0" * 400}, "prompt_tokens": 5, "output_tokens": 5}}', "0000 is not a time"),
        ('{"time": 1, "prompt_tokens": -3, "output_tokens": 5}', "log.jsonl:1: -3 is not a number of tokens"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": true}', "log.jsonl:1: True is not a number of tokens"),
        ('{"time": 1, "prompt_tokens": 5.7, "output_tokens": 5}', "log.jsonl:1: 5.7 is not a number of tokens"),
        ('{"time": 1, "prompt_tokens": "5_0", "output_tokens": 5}', "log.jsonl:1: '5_0' is not a number of tokens"),
        ('{"time": 1, "prompt_tokens": 10000000000, "output_tokens": 5}', "log.jsonl:1: prompt_tokens is above"),
        ("[" * 100_000, "log.jsonl:1 is not JSON (maximum recursion depth exceeded"),
        ('{"time": true, "prompt_tokens": 5, "output_tokens": 5}', "log.jsonl:1: True is not a time"),
        ('{"time": 1700000000000, "prompt_tokens": 5, "output_tokens": 5}', "in the year 5138 or later; milliseconds?"),
        ('{"time": 1, "time": 2, "prompt_tokens": 5, "output_tokens": 5}', "the key 'time' is there 2 times"),
    ],
)
def test_a_line_of_a_log_that_cannot_be_used_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "log.jsonl").write_text(line + "\n")
    with pytest.raises(SettingError) as refused:
        read_request_log(tmp_path / "log.jsonl", notes=[])
    assert said in str(refused.value)


def test_a_column_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("time,prompt_tokens,output_tokens,prompt_tokens\n1,5,3,7\n")
    with pytest.raises(SettingError, match="has the column 'prompt_tokens' 2 times"):
        read_request_log(tmp_path / "log.csv", notes=[])


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u2029"])
def test_a_line_ends_where_json_lines_end(tmp_path: Path, separator: str) -> None:
    line = f'{{"time": 1, "prompt_tokens": 5, "output_tokens": 5, "user": "a{separator}b"}}\n'
    (tmp_path / "log.jsonl").write_text(line * 2, encoding="utf-8")
    assert len(read_request_log(tmp_path / "log.jsonl", notes=[])) == 2


@pytest.mark.parametrize("given", ['"a\\u0000b"', '"\\ud800"'])
@pytest.mark.parametrize("key", ["requests_file", "request_log"])
def test_a_name_that_no_file_can_have_is_an_error(tmp_path: Path, key: str, given: str) -> None:
    (tmp_path / "load.json").write_text(f'{{"engine": {{}}, "{key}": {given}}}')
    with pytest.raises(SettingError, match=f"load.json: {key} is .*; no file can have that name"):
        read_workload(str(tmp_path / "load.json"), notes=[])


def test_a_key_that_is_there_twice_is_an_error_in_json_too(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text('{"engine": {"num_gpu_blocks": 256, "num_gpu_blocks": 999}}')
    with pytest.raises(SettingError, match="is not JSON: the key 'num_gpu_blocks' is there 2 times"):
        read_workload(str(tmp_path / "load.json"), notes=[])


def test_a_csv_field_beyond_what_csv_reads_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"time,prompt_tokens,output_tokens\n1,{'9' * 200_000},3\n")
    with pytest.raises(SettingError, match=r"is not CSV: field larger than field limit"):
        read_request_log(tmp_path / "log.csv", notes=[])


def test_a_file_without_an_end_is_read_up_to_a_bound() -> None:
    with pytest.raises(SourceError, match=r"/dev/zero: more than 268,435,456 bytes"):
        read_requests(Path("/dev/zero"))


def test_an_empty_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("time,prompt_tokens,output_tokens\n")
    with pytest.raises(SourceError, match="no request with prompt and output tokens"):
        read_request_log(tmp_path / "log.csv", notes=[])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("just words", "holds no mapping"),
        ("engine: [1", "is not YAML"),
        (
            YAML + "requests: []\nrequests_file: r.jsonl\n",
            "has requests and requests_file; requests come from one place",
        ),
        (YAML + "requests: 2001-99-99\n", "is not YAML: month must be in 1..12"),
        (YAML + f"clients: {'9' * 5000}\n", "is not YAML: Exceeds the limit"),
        (YAML + f"requests_file: &a [{', '.join(['[x, x, x, x]'] * 9)}]\n", "requests_file is [["),
        (YAML + "requests_file: 7\n", "requests_file is 7; it must be the name of a file"),
        (YAML + 'requests_file: "a\\0b"\n', "load.yaml: requests_file is 'a\\x00b'; no file can have that name"),
        (YAML + "request_log: !!bool maybe\n", "is not YAML: a tag does not fit its value"),
        (YAML + "request_log: !!timestamp soon\n", "is not YAML: a tag does not fit its value"),
        (YAML + "clients: 8\nclients: 3\n", "is not YAML: the key 'clients' is there twice"),
        (YAML + "requests:\n  - {prompt_tokens: 0, output_tokens: 1}\n", "load.yaml: requests[0]: prompt_tokens is 0"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "load.yaml").write_text(text)
    with pytest.raises(SettingError) as refused:
        read_workload(str(tmp_path / "load.yaml"), notes=[])
    assert said in str(refused.value)


def test_a_missing_file_names_the_built_in_workloads(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"No such file.*long-context-trap"):
        read_workload(str(tmp_path / "none.yaml"), notes=[])


def test_the_long_context_trap_is_calm_without_its_document() -> None:
    trap = read_workload("long-context-trap", notes=[])
    assert trap.engine.num_gpu_blocks == 6103
    with_document = simulate(trap.engine, trap.cost, trap.requests, trap.clients)
    without = [request for request in trap.requests if request.prompt_tokens < 64_000]
    assert with_document.preemptions > 0
    assert simulate(trap.engine, trap.cost, without, trap.clients).preemptions == 0
