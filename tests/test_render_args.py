from dataclasses import replace

from reports import DOWN, FLEET, HEALTHY, THRASHING, report_of

from kvwatch.proposal import Recommendation
from kvwatch.render.args import report_args


def restart(flag: str) -> Recommendation:
    return replace(THRASHING.recommendations[1], flag=flag)


def test_the_flags_of_one_engine_stand_on_one_line_and_alone() -> None:
    both = replace(THRASHING, recommendations=(restart("--max-num-seqs 20"), restart("--watermark 0.05")))
    assert report_args(report_of(both)) == "--max-num-seqs 20 --watermark 0.05"


def test_what_needs_no_restart_is_no_flag() -> None:
    assert report_args(report_of(replace(THRASHING, recommendations=THRASHING.recommendations[:1]))) == ""


def test_nothing_is_printed_where_nothing_is_proposed() -> None:
    assert report_args(report_of(HEALTHY, DOWN)) == ""


def test_of_several_engines_each_line_says_whose_it_is() -> None:
    assert report_args(FLEET) == "--watermark 0.08  # llama-3-8b engine 0 on http://10.0.0.7:8000"


def test_a_name_cannot_end_the_comment_behind_the_flags() -> None:
    key = replace(THRASHING.key, model_name="m\nrm -rf ~\r\x1b[2J\u2028")
    text = report_args(report_of(replace(THRASHING, key=key), HEALTHY))
    assert text == r"--watermark 0.08  # m rm -rf ~\u000d\u001b[2J\u2028 engine 0 on http://10.0.0.7:8000"
