from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from bulletserve.core.correction import Correction
from bulletserve.core.events import Status
from bulletserve.core.slo import Slo
from bulletserve.telemetry.histogram import Histogram
from bulletserve.telemetry.metrics import AnswerTimes, Metrics
from tests.server.conftest import Served

STATUS = Status(10.0, 3, 2, 25, 100, 0.5, 96, 36, 4, 1000, 250, 7, 2.0, 0.125)


def values(text: str) -> dict[str, float]:
    """Every sample by name, labels other than the model's appended."""
    result = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"]
            result[":".join([sample.name.removeprefix("bullet:"), *labels.values()])] = sample.value
    return result


def test_what_the_engine_says() -> None:
    metrics = Metrics("m")
    metrics.update(STATUS)
    found = values(metrics.text().decode())
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert found["kv_cache_usage_perc"] == 0.25
    assert found["num_preemptions_total"] == 4
    assert found["prefix_cache_queries_total"] == 1000
    assert found["prefix_cache_hits_total"] == 250
    assert (found["prefill_sms"], found["decode_sms"]) == (96, 36)
    assert found["longest_decode_gap_seconds"] == 0.125
    metrics.update(None)
    assert values(metrics.text().decode())["num_requests_running"] == 0


def test_the_share_of_time_with_both_lanes() -> None:
    metrics = Metrics("m")
    metrics.update(STATUS)
    assert values(metrics.text().decode())["both_lanes_share"] == 0
    metrics.update(Status(12.0, 0, 0, 0, 100, 0.0, 96, 36, 4, 0, 0, 7, 3.5, 0.0))
    assert values(metrics.text().decode())["both_lanes_share"] == 0.75
    metrics.update(Status(13.0, 0, 0, 0, 100, 0.0, 96, 36, 4, 0, 0, 7, 0.5, 0.0))  # a new engine
    assert values(metrics.text().decode())["both_lanes_share"] == 0


def test_busy_lanes_switches_and_standstills() -> None:
    metrics = Metrics("m")
    metrics.update(replace(STATUS, switches=12, prefill_busy_s=3.5, decode_busy_s=4.5, standing_s=6.0))
    found = values(metrics.text().decode())
    assert found["switches_total"] == 12
    assert found["lane_busy_seconds_total:prefill"] == 3.5
    assert found["lane_busy_seconds_total:decode"] == 4.5
    assert found["standing_seconds"] == 6


def test_where_the_time_of_an_answer_went() -> None:
    metrics = Metrics("m")
    times = AnswerTimes(arrival_s=10.0, admitted_s=10.5, first_token_s=12.0, last_token_s=16.0)
    slo = Slo("chat", 2.5, 0.5)
    metrics.answered(slo, times, prompt_tokens=7, tokens=9, max_tokens=100)  # a mean of exactly 0.5 s
    metrics.answered(slo, times, prompt_tokens=7, tokens=8, max_tokens=100)
    metrics.answered(Slo(), times, prompt_tokens=7, tokens=1, max_tokens=100)
    found = values(metrics.text().decode())
    for name, seconds in (("queue", 0.5), ("prefill", 1.5), ("decode", 4.0), ("inference", 5.5)):
        assert found[f"request_{name}_time_seconds_sum"] == 3 * seconds
    assert found["e2e_request_latency_seconds_sum"] == 18
    assert found["request_params_max_tokens_sum"] == 300
    assert found["request_slo_total:met:chat"] == 1
    assert found["request_slo_total:missed:chat"] == 1
    assert found["request_slo_total:met:default"] == 1


def test_vllms_names_are_all_there_under_our_prefix(fresh: Served) -> None:
    """So that a dashboard is ported by replacing `vllm:`."""
    text = fresh.http.get("/metrics").text
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"),
        *("generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket"),
        *("inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "iteration_tokens_total_bucket"),
        *("request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket"),
        *("request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket"),
        *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket"),
        "request_params_n_bucket",
    ):
        assert f"\nbullet:{name}{{" in text, name
    assert 'block_size="16"' in text and 'num_gpu_blocks="1000"' in text


def test_histogram() -> None:
    histogram = Histogram((0.001, 0.01))
    for value in (0.0005, 0.001, 0.002, 5.0):
        histogram.observe(value)
    assert histogram.buckets() == [("0.001", 2.0), ("0.01", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 5.0035


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = Metrics("a"), Metrics("b")
    first.generation_tokens += 5
    assert values(second.text().decode())["generation_tokens_total"] == 0


def test_each_prompt_tells_once_how_many_answers_it_was_to_have(fresh: Served) -> None:
    fresh.say("hi")
    for body in ({"n": 3}, {"prompt": ["a", "b"], "n": 2}, {}):
        assert fresh.post(**body).status_code == 200  # type: ignore[arg-type]
    found = values(fresh.http.get("/metrics").text)
    assert [found[f"request_params_n_{part}"] for part in ("count", "sum", "bucket:1.0", "bucket:2.0")] == [4, 8, 1, 3]


def test_requests_are_counted(fresh: Served) -> None:
    fresh.say("hello world")
    fresh.post(max_tokens=50)
    fresh.post(max_tokens=2, prompt="hello hello")
    fresh.post(stop="wor", max_tokens=50)
    found = values(fresh.http.get("/metrics").text)
    assert found["request_success_total:stop"] == 2
    assert found["request_success_total:length"] == 1
    assert found["request_success_total:abort"] == 0
    assert found["prompt_tokens_total"] == 1 + 3 + 1
    assert found["generation_tokens_total"] >= 6 + 2 + 3
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["inter_token_latency_seconds_count"] == 5 + 1 + 2
    assert found["e2e_request_latency_seconds_count"] == 3
    assert found["request_prompt_tokens_sum"] == 1 + 3 + 1
    assert found["request_generation_tokens_sum"] == 6 + 2 + 3
    assert found["inter_token_latency_seconds_bucket:0.001"] <= 8
    fresh.wait_until(lambda: values(fresh.http.get("/metrics").text)["num_preemptions_total"] == 7)


def test_corrections_and_errors_are_told_by_phase() -> None:
    metrics = Metrics("m")
    text = metrics.text().decode()
    assert 'bullet:forecast_correction_ratio{model_name="m",phase="decode"} 1.0' in text
    metrics.update(replace(STATUS, correction=Correction(1.1, 0.9, 1.0), forecast_errors=Correction(0.02, 0.03, 0.0)))
    text = metrics.text().decode()
    assert 'bullet:forecast_correction_ratio{model_name="m",phase="prefill"} 1.1' in text
    assert 'bullet:forecast_correction_ratio{model_name="m",phase="decode"} 0.9' in text
    assert 'bullet:forecast_error_ratio{model_name="m",phase="decode"} 0.03' in text
