from kvwatch.checks import ALL
from kvwatch.finding import alert_name


def test_an_alert_is_named_after_its_check_and_kv_stays_upper_case() -> None:
    assert alert_name("preemptions_sustained") == "VLLMPreemptionsSustained"
    assert alert_name("kv_cache_saturated") == "VLLMKVCacheSaturated"
    assert len({alert_name(check.id) for check in ALL}) == len(ALL)
