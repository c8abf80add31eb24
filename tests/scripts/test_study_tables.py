"""Tables and figures of the study say what was measured; those of the pages are the recorded results."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from scripts.study import arms, cells, page, page_tables, placeholders, plans_and_records, table
from scripts.study import figures as drawing
from scripts.study import results as results_of
from scripts.study.plan import find_plan
from scripts.study.record import add_distilled, add_lines, record_parents
from scripts.study.results import forward_passes


def test_results_are_added_to_those_on_record(tmp_path):
    """A study that starts again elsewhere must not wipe out what is on record, nor mix with other parents."""

    def write(path, *lines):
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))

    record, results = tmp_path / "record.jsonl", tmp_path / "results.jsonl"
    write(record, line("mean", 0, 5.0), line("mean", 0, 4.5, stage=(0.01, "distill", 1e-3)))
    write(results, line("mean", 0, 5.1), line("first", 0, 6.0))
    add_lines(results, record)
    assert [(each["arm"], each["held_out_loss"]) for each in arms.read_results(record)] == [
        ("mean", 4.5), ("mean", 5.1), ("first", 6.0),
    ]  # fmt: skip
    write(results, line("mean", 0, 5.1) | {"parent_loss": 4.01})
    with pytest.raises(click.ClickException, match=r"another parent 0 than .*: its loss is 4.0100, not 4.0000"):
        add_lines(results, record)
    write(record, line("first", 0, 6.0) | {"tasks": {}})
    write(results, line("first", 0, 6.0))
    with pytest.raises(click.ClickException, match=r"has no tasks of first, but .* has; measure it too"):
        add_lines(results, record)
    assert "tasks" in arms.read_results(record)[0]


def test_a_record_is_compared_with_its_plan(tmp_path):
    """The plan has the mean and a fit of two K/V heads, with two uptrainings, and a model from scratch."""
    distilled, too_fast = (0.1, "distill", 1e-3), (0.1, "distill", 9e-3)
    fit = {"convert": ("--method", "fit", "--refit", "--calibration-tokens", "2048"), "schedule": "cosine"}
    lines = [
        line("mean", 0, 5.0) | {"behaviour": {}, "commit": "aaa"},
        line("fit-refit", 0, 5.0, **fit) | {"tasks": {}, "commit": "aaa"},
        line("fit-refit", 0, 5.0, **fit, stage=distilled) | {"behaviour": {}, "commit": "bbb+"},
        line("fit-refit", 0, 5.0, **fit, stage=too_fast) | {"commit": "aaa"},
        line("mean", 1, 5.0) | {"commit": "aaa"},
        line("mean", 0, 5.0, convert=("--method", "mean", "--renorm", "norm")) | {"commit": "aaa"},
        line("first", 0, 5.0) | {"commit": "aaa"},
    ]
    plan = tmp_path / "smoke.toml"
    plan.write_text(find_plan("smoke").read_text())
    (tmp_path / "not_run.toml").write_text(plan.read_text())
    (tmp_path / "smoke.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert plans_and_records.table(tmp_path, tmp_path).splitlines()[2:] == [
        "| `smoke` | aaa (6), bbb+ (1) | of 7: 1 of other arms, 1 of other seeds, 1 with other arguments, "
        "1 with other uptrainings, 1 with tasks that the plan lacks "
        "| of 5: 1 of other arms, 1 with other uptrainings, 1 without behaviour |"
    ]


def line(
    arm,
    seed,
    held_out,
    *,
    stage=(0, None, None),
    groups=2,
    convert=("--method", "mean"),
    schedule="wsd",
    batch=1024,
    part="all",
):
    alpha, loss, lr = stage
    return {
        "plan": "p", "parent": "parent", "arm": arm, "groups": groups, "seed": seed,
        "alpha": alpha, "loss": loss, "lr": lr, "schedule": schedule if loss else None, "held_out_loss": held_out,
        "parent_loss": 4.0, "convert": convert, "from_scratch": False, "kl": 0.5, "agreement": 0.75,
        "tokens": int(alpha * 1e6), "global_batch_tokens": batch if loss else None, "trainable": part if loss else None,
    }  # fmt: skip


def test_figures_of_several_parents():
    """Two are both written; equal ones once, since nothing varies."""
    assert [cells.show(dict(enumerate(values)), "{:+.1f}") for values in ((), (1,), (1, 2), (1, 1, 1), (1, 2, 3))] == [
        "–", "+1.0", "+1.0 and +2.0", "+1.0", "+2.0 ± 1.0",
    ]  # fmt: skip


def test_table(tmp_path):
    lines = [
        line("first", 0, 7.0), line("first", 1, 8.0),
        line("parent", 0, 4.0, groups=4, convert=None),
        line("mean", 0, 5.0), line("mean", 1, 6.0),
        line("mean", 0, 4.6, stage=(0.01, "distill", 1e-3)),
        line("mean", 1, 4.8, stage=(0.01, "distill", 1e-3)),
        line("mean", 0, 4.5, stage=(0.01, "distill", 3e-4)),
        line("mean", 1, 4.5, stage=(0.01, "distill", 3e-4)),
        line("mean", 0, 4.1, stage=(0.01, "distill", 1e-4)),
    ]  # fmt: skip
    path = tmp_path / "results.jsonl"
    early = [{name: value for name, value in each.items() if name != "schedule"} for each in lines]
    path.write_text("".join(json.dumps(each) + "\n" for each in early))
    assert CliRunner().invoke(table.main, [str(path)]).output.splitlines() == [
        "### p: merged to 2 K/V heads",
        "",
        "| arm | after conversion | share of mean's gap | distill, α 0.01 |",
        "| --- | --- | --- | --- |",
        "| parent | 4.0000 | 0.0% | – |",
        "| mean | 5.0000 and 6.0000 | 100.0% | 4.5000 (lr 0.0003) |",
        "| first | 7.0000 and 8.0000 | 300.0% and 200.0% | – |",
        "",
        "| mean, distill, α 0.01; peak: | 0.0001 | 0.0003 | 0.001 |",
        "| --- | --- | --- | --- |",
        "| wsd, 1,024 tokens per step | 4.100 | 4.500 | 4.600 and 4.800 |",
        "",
        "| arm | uptraining | KL from parent | agreement | recovered | over the control |",
        "| --- | --- | --- | --- | --- | --- |",
        "| mean | none | 0.500 | 75.0% | – | – |",
        "| mean | distill, α 0.01 | 0.500 | 75.0% | 50% and 75% | +0.500 |",
        "| first | none | 0.500 | 75.0% | – | – |",
    ]


def test_table_by_cache():
    def latent(seed, held_out, groups, sizes, stage=(0, None, None), part=None):
        convert = ("--calibration", "shipped")
        values = line("latent", seed, held_out, groups=groups, convert=convert, stage=stage)
        return values | {"latent": sizes, "trainable": part}

    heads = [line("merged", 0, 4.5, groups=groups, convert=()) for groups in (1, 2)]
    lines = [
        line("parent", 0, 4.0, convert=None, groups=4), line("parent", 1, 4.0, convert=None, groups=4),
        *heads, line("merged", 1, 4.7, groups=2, convert=()),
        latent(0, 4.4, 1, [32, 32]),
        latent(0, 4.3, 2, [64, 64]), latent(1, 4.1, 2, [64, 64]),
        latent(0, 4.3, 1, [32, 32], (0.01, "distill", 1e-4), "attention"),
        latent(0, 4.2, 1, [32, 32], (0.01, "distill", 3e-5), "attention"),
        latent(0, 4.1, 2, [64, 64], (0.01, "distill", 3e-5), "all"),
    ]  # fmt: skip
    lines = [{"trainable": None, "latent": None} | each for each in lines]
    assert page_tables.by_cache(lines, "α {alpha:g}").splitlines() == [
        "|  | distilled | 64 elements | 128 elements |",
        "| --- | --- | --- | --- |",
        "| merged | – | 0.5000† | 0.5000 and 0.7000 |",
        "| latent | – | 0.4000† | 0.3000 and 0.1000 |",
        "| latent | α 0.01, attention | 0.2000† (lr 3e-05) | – |",
        "| latent | α 0.01, all | – | 0.1000† (lr 3e-05) |",
        "",
        "† 1 of 2 parents.",
    ]


def test_table_of_kinds_of_tokens_by_part():
    """The parent's row has its own losses, the others what they add; lines that lack them are left out."""

    def watched(measured, copied, part=None):
        return measured | {
            "trainable": part,
            "behaviour": {
                "loss_by_kind": {"once": 6.5, "copied": copied},
                "parents_loss_by_kind": {"once": 6.0, "copied": 2.0},
            },
        }

    distilled = (0.01, "distill", 5e-4)
    lines = [
        watched(line("parent", 0, 4.0, convert=None), 2.0),
        watched(line("mean", 0, 5.0), 9.0),
        line("default", 0, 4.2, stage=distilled) | {"trainable": "all"},
        watched(line("default", 0, 4.2, stage=distilled), 3.0, "kv"),
    ]
    assert page_tables.kinds_by_part(lines).splitlines()[2:] == [
        "| parent | – | 6.500 | 2.000 |",
        "| mean | – | +0.500 | +7.000 |",
        "| default | 10,000 tokens, kv | +0.500 | +1.000 |",
    ]


def test_tables_of_a_curve_and_of_what_training_recovers_by_text_kind():
    parent = line("parent", 0, 4.0, convert=None) | {"text_kinds": {"prose": 4.0, "code": 2.0}}
    merged = line("default", 0, 5.0) | {"text_kinds": {"prose": 5.0, "code": 4.0}}
    distilled = line("default", 0, 4.2, stage=(0.01, "distill", 5e-4))
    steps = ((0, 5.0, 0.9, 0.5), (5, 4.5, 0.6, 0.6), (10, 4.2, 0.3, 0.75))
    distilled["curve"] = [dict(zip(("step", "loss", "kl", "agreement"), step, strict=True)) for step in steps]
    distilled["text_kinds"] = {"prose": 4.25, "code": 3.0}
    lines = [parent, merged, distilled]
    assert page_tables.along_training(lines).splitlines()[2:] == [
        "| 0 | 1.0000 | 0% | 0.900 | 50.0% |",
        "| 5,120 | 0.5000 | 50% | 0.600 | 60.0% |",
        "| 10,240 | 0.2000 | 80% | 0.300 | 75.0% |",
    ]
    assert page_tables.recovered_by_text_kind(lines).splitlines() == [
        "|  | parent | after conversion | 10,000 tokens |",
        "| --- | --- | --- | --- |",
        "| prose | 4.000 | +1.000 | +0.250 (75%) |",
        "| code | 2.000 | +2.000 | +1.000 (50%) |",
        "| average | 3.000 | +1.500 | +0.625 (58%) |",
    ]
    other = distilled | {"seed": 1, "text_kinds": {"prose": 4.75, "code": 3.0}}
    assert "| prose | 4.000 | +1.000 | +0.500 (50%) |" in page_tables.recovered_by_text_kind([*lines, other])


def test_table_by_tokens():
    """Over the orders of the data. The merge is the same for all of them, and recorded once or for each."""
    parent = line("parent", 0, 4.0, convert=None)
    starts = [line("default", seed, 5.0) for seed in (0, 1)]
    distilled = (0.01, "distill", 5e-4)
    lines = [line("default", seed, loss, stage=distilled) for seed, loss in ((0, 4.2), (1, 4.4))]
    assert page_tables.by_tokens([parent, *starts, *lines]).splitlines()[2:] == [
        "| 0 | 2 | 1.0000 | 0% | 0.500 | 75.0% |",
        "| 10,000 | 2 | 0.2000 and 0.4000 | 80% and 60% | 0.500 | 75.0% |",
    ]


def test_table_by_rate():
    """Rows by loss, then by rate; the last column is the mean over kinds of text of what is lost to the parent."""
    parent = line("parent", 0, 4.0, convert=None) | {"text_kinds": {"prose": 4.0, "code": 2.0}}
    merged = line("mean", 0, 5.0) | {"text_kinds": {"prose": 5.0, "code": 4.0}}
    trained = [
        line("mean", 0, held_out, stage=(0.01, loss, lr)) | {"text_kinds": {"prose": held_out, "code": 3.0}}
        for held_out, loss, lr in ((4.6, "next-token", 1e-4), (4.4, "distill", 1e-3), (4.8, "distill", 1e-4))
    ]
    rows = [
        "| none: after conversion | 1.000 | 0.500 | 75.0% | 1.500 |",
        "| distill, 0.0001 | 0.800 | 0.500 | 75.0% | 0.900 |",
        "| distill, 0.001 | 0.400 | 0.500 | 75.0% | 0.700 |",
        "| next-token, 0.0001 | 0.600 | 0.500 | 75.0% | 0.800 |",
    ]
    assert page_tables.one_merge_by_rate([merged, *trained], [parent]).splitlines()[2:] == rows
    copied = {"behaviour": {"loss_by_kind": {"copied": 7.25}}}
    watched = page_tables.one_merge_by_rate([each | copied for each in (merged, *trained)], [parent, merged])
    assert watched.splitlines()[2] == "| none: after conversion | 1.000 | 0.500 | 75.0% | 7.2 | 1.500 |"


def test_table_of_extrapolations():
    """A loss that falls with a power of the tokens is predicted exactly; a part with two lengths is left out.

    A law is not followed to more than 20 times the longest training.
    """
    start = line("default", 0, 5.0) | {"trainable": None}
    lines = [
        line("default", 0, 4 + 0.8 * tokens**-power, stage=(tokens * 1e-6, "distill", 5e-4)) | {"trainable": part}
        for part, power in (("all", 0.5), ("lora", 0.1)) for tokens in (1, 4, 16)
    ]  # fmt: skip
    short = [each | {"trainable": "kv"} for each in lines[:2]]
    other = line("mean", 0, 6.0) | {"trainable": None}
    assert page_tables.extrapolated([start, other, *lines, *short], "default").splitlines() == [
        "| trained | exponents | predicted at 16 | measured | tokens to a tenth of the cost |",
        "| --- | --- | --- | --- | --- |",
        "| all | 0.50, 0.50 | 0.200 | 0.200 | 0 M |",
        "| lora | 0.10, 0.10 | 0.606 | 0.606 | more than 0 M |",
    ]


def test_table_of_tasks(tmp_path):
    """SmolLM2 right after conversion, and distilled on two texts; other lines are left out."""
    tasks = {"last_word": {"acc": 0.25, "acc_stderr": 0.03, "perplexity": 12.34}, "prose": {"bits_per_byte": 1.2345}}
    start, distilled = (0, None, None), (0.01, "distill", 5e-4)
    smollm2 = {"parent": "smollm2", "trainable": None}
    records = {
        "behaviour": [line("mean", 0, 5.0) | {"tasks": tasks} | each for each in ({}, smollm2)],
        "smollm2_tokens": [line("default", 0, 4.2, stage=stage) | smollm2 for stage in (start, distilled)],
        "smollm2_mixed": [
            line("default", 0, 4.2, stage=stage) | smollm2 | {"tasks": tasks} for stage in (start, distilled)
        ],
    }
    records["smollm2_mixed"][1]["trainable"] = "all"
    for plan, lines in records.items():
        (tmp_path / f"{plan}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert page_tables.tasks(placeholders.smollm2_lines(tmp_path)).splitlines()[2:] == [
        "| mean | – | 25.0% ± 3.0% | 12.3 | 1.234 |",
        "| default, mixed text | 10,000 tokens, all | 25.0% ± 3.0% | 12.3 | 1.234 |",
    ]


def test_table_of_the_field(tmp_path):
    """Ways without a record are left out, and so are uptrainings of another part."""
    distilled = (0.01, "distill", 5e-4)
    records = {
        "short": [
            line("mean", 0, 4.5, groups=2),
            line("mean", 1, 4.7, groups=2),
            line("mean", 0, 4.2, stage=distilled),
        ],
        "latent": [line("latent", 0, x, groups=1, stage=distilled) for x in (4.1, 4.3)],
    }
    for each, part in zip(records["latent"], ("attention", "all"), strict=True):
        each["trainable"] = part
    for plan, lines in records.items():
        (tmp_path / f"{plan}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert placeholders.field(tmp_path).splitlines() == [
        "|  | parents | set | distilled part | 128 elements | 128 elements, distilled | 64 elements | "
        "64 elements, distilled |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| mean (Ainslie et al.; AverageKV) | 2 | A | all | 0.5000 and 0.7000 | 0.2000 (1 of 2 parents) | – | – |",
        "| **`mha-to-mla`** | 1 | C | attention | – | – | – | 0.1000 |",
    ]


def test_table_of_latent_attention_on_smollm2(tmp_path):
    """Beside the default merge, distilled as long and in the same part."""
    start, short, longer = (0, None, None), (0.01, "distill", 5e-4), (0.1, "distill", 5e-4)
    parent = line("parent", 0, 4.0, convert=None, groups=3)
    merged = [line("default", 0, x, groups=1, stage=stage) for x, stage in ((4.6, start), (4.3, short), (4.2, longer))]
    own = [line("latent", 0, x, groups=1, stage=stage) for x, stage in ((4.5, start), (4.1, short))]
    for each in (*merged[1:], own[1]):
        each["trainable"] = "attention"
    own = [each | {"latent": [64, 64]} for each in own]
    for plan, lines in (("smollm2_tokens", [parent, *merged]), ("latent_smollm2", own)):
        (tmp_path / f"{plan}.jsonl").write_text(
            "".join(json.dumps({"trainable": None} | each) + "\n" for each in lines)
        )
    assert placeholders.latent_smollm2(tmp_path).splitlines()[2:] == [
        "| merged | – | 0.6000 |",
        "| merged | 10,000 tokens, attention | 0.3000 (lr 0.0005) |",
        "| latent | – | 0.5000 |",
        "| latent | 10,000 tokens, attention | 0.1000 (lr 0.0005) |",
    ]


def test_table_with_what_was_trained_from_scratch():
    """It stands in the table of its own number of K/V heads alone; the parent stands in all."""
    less = line("less", 0, 4.2, groups=1, convert=None) | {"from_scratch": True}
    merged = [line("mean", 0, 5.0, groups=groups) for groups in (2, 1)]
    two, one = table.tables([*merged, less, line("parent", 0, 4.0, groups=4, convert=None)])
    assert ("| less |" in two, "| less | 4.2000 | 20.0% |" in one) == (False, True)
    assert all("| parent | 4.0000 | 0.0% |" in table for table in (two, one))


def test_table_of_rates():
    lines = [
        line("mean", seed, x + seed / 10, stage=(0.01, "distill", lr), schedule=schedule)
        for seed in (0, 1)
        for lr, schedule, x in ((1e-3, "wsd", 4.5), (1e-4, "wsd", 4.6), (1e-3, "cosine", 4.4), (1e-4, "cosine", 4.7))
    ]
    losses, rates, _ = table.tables(lines)
    assert losses.splitlines()[-1] == "| mean | – | – | 4.4000 and 4.5000 (lr 0.001, cosine) |"
    assert rates.splitlines() == [
        "| mean, distill, α 0.01; peak: | 0.0001 | 0.001 |",
        "| --- | --- | --- |",
        "| wsd, 1,024 tokens per step | 4.600 and 4.700 | 4.500 and 4.600 |",
        "| cosine, 1,024 tokens per step | 4.700 and 4.800 | 4.400 and 4.500 |",
    ]


def test_table_of_measures():
    lines = [
        line("mean", 0, 6.0), line("mean", 0, 5.0, stage=(0.05, "next-token", 1e-3)),
        line("fit-refit", 0, 4.5, stage=(0.05, "distill", 1e-3)), line("fit-refit", 0, 5.0),
        line("parent", 0, 3.9, stage=(0.05, "next-token", 1e-3), groups=4, convert=None),
        line("parent", 0, 4.0, groups=4, convert=None),
    ]  # fmt: skip
    assert table.distances_table(lines).splitlines()[2:] == [
        "| parent | next-token, α 0.05 | 0.500 | 75.0% | – | -10% | – |",
        "| fit-refit | none | 0.500 | 75.0% | – | 100% | – |",
        "| fit-refit | distill, α 0.05 | 0.500 | 75.0% | 50% | 50% | +0.600 |",
        "| mean | none | 0.500 | 75.0% | – | 200% | – |",
        "| mean | next-token, α 0.05 | 0.500 | 75.0% | 50% | 100% | +1.100 |",
    ]


def test_the_control_is_the_parent_where_training_harms_it():
    lines = [line("parent", 0, loss, stage=stage, groups=4, convert=None)
             for loss, stage in ((4.0, (0, None, None)), (4.1, (0.05, "next-token", 1e-3)),
                                 (3.9, (0.1, "next-token", 1e-3)))]  # fmt: skip
    assert [table.control(lines, (alpha, "distill")) for alpha in (0.05, 0.1)] == [{0: 4.0}, {0: 3.9}]


def test_table_of_savings():
    """Distilling a token costs four forward passes, training on the next one three, calibrating with it two."""
    convert = ("--method", "fit", "--calibration-tokens", "3000")
    lines = [
        line("mean", 0, 4.6, stage=(0.05, "next-token", 1e-3), batch=4096),
        line("mean", 0, 4.55, stage=(0.05, "next-token", 1e-3)),
        line("mean", 0, 4.53, stage=(0.05, "next-token", 5e-4)),
        line("mean", 0, 4.45, stage=(0.05, "distill", 5e-4)),
        line("mean", 0, 4.48, stage=(0.01, "distill", 2e-3), part="attention"),
        line("first", 0, 4.35, stage=(0.05, "distill", 5e-4)),
        line("fit-refit", 0, 4.7, convert=convert),
        line("fit-refit", 0, 4.5, stage=(0.005, "distill", 1e-3), convert=convert),
        line("fit-refit", 0, 4.4, stage=(0.005, "next-token", 1e-3), convert=convert),
    ]
    assert page_tables.savings(lines, "fit-refit").splitlines() == [
        "|  | tokens trained on | with calibration | compute | 2 K/V heads |",
        "| --- | --- | --- | --- | --- |",
        "| mean, next-token, α 0.05, 4,096 a step (the paper's) | 100% | 100% | 100% | 4.6000 |",
        "| mean, next-token, α 0.05, 1,024 a step (the paper's) | 100% | 100% | 100% | 4.5300 (lr 0.0005) |",
        "| mean, distill, α 0.01, attention, 1,024 a step | 20.0% | 20.0% | 26.7% | 4.4800 |",
        "| mean, distill, α 0.05, 1,024 a step | 100.0% | 100.0% | 133.3% | 4.4500 |",
        "| fit-refit, no training | 0.0% | 6.0% | 4.0% | 4.7000 |",
        "| fit-refit, distill, α 0.005, 1,024 a step | 10.0% | 16.0% | 17.3% | 4.5000 |",
    ]


def test_table_of_distances():
    """Compute is a share of the recipe's; a model at several rates is shown at the best."""
    recipe, distilled = (0.05, "next-token", 1e-3), (0.01, "distill", 5e-4)
    lines = [line("parent", 0, 4.0, groups=8, convert=None)]
    for groups in (4, 2):
        lines.append(line("mean", 0, 4.6, stage=recipe, groups=groups))
        lines.append(line("mean", 0, 4.5, stage=distilled, groups=groups) | {"kl": 0.1 * groups})
        lines.append(line("mean", 0, 4.9, stage=(0.01, "distill", 1e-4), groups=groups) | {"kl": 9.0})
    stages = ("mean", recipe[:2]), ("mean", distilled[:2])
    assert page_tables.distances(lines, stages).splitlines() == [
        "| arm | compute | 8 → 4 heads | 8 → 2 heads |",
        "| --- | --- | --- | --- |",
        "| mean; next-token, α 0.05 | 100.0% | 0.500; 75.0% | 0.500; 75.0% |",
        "| mean; distill, α 0.01 | 26.7% | 0.400; 75.0% | 0.200; 75.0% |",
    ]


def test_compute_of_the_default():
    """Refining costs as much as training; it is part of the default, on as many tokens as the calibration has."""
    shipped = ("--calibration", "shipped")
    for convert, forwards in (
        (shipped, 5 * 65_536),
        ((*shipped, "--calibration-tokens", "3000"), 5 * 3000),
        ((*shipped, "--calibration-tokens", "3000", "--refine", "0"), 2 * 3000),
        (("--method", "fit", "--calibration-tokens", "3000", "--refit"), 2 * 3000),
        (("--method", "mean"), 0),
        (("--method", "pca", "--calibration", "none"), 0),
        (("--method", "fit", "--calibration", "shipped"), 2 * 65_536),
    ):
        assert forward_passes(line("x", 0, 5.0, convert=convert)) == forwards
        trained = line("x", 0, 5.0, convert=convert, stage=(0.01, "distill", 1e-3))
        assert forward_passes(trained) == forwards + 4 * 10_000


def test_table_of_parents(tmp_path):
    """By tenths of their training; what is still being trained does not count, what lies elsewhere by now does.

    What was trained with fewer heads from nothing has a column of its own.
    """
    runs = (("parent-0", 0, 20), ("parent-1", 1, 20), ("parent-2", 2, 30), ("parent-0-g2", 7, 20))
    for name, seed, steps in (*runs, ("parent-0-gemma2", 8, 20)):
        run = tmp_path / "p" / name
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"settings": {"steps": steps, "seed": seed}, "cache_sha256": "c"}))
        losses = {0: 8.0, 10: 6.0 + seed, 20: 5.0 + seed}
        records = [{"step": 1, "loss": 7.0}, *({"step": s, "evaluation": {"loss": x}} for s, x in losses.items())]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    record = tmp_path / placeholders.PARENTS
    earlier = [
        {"plan": name, "seed": seed, "steps": 20, "share": 1.0, "held_out_loss": loss}
        for name, seed, loss in (("p", 0, 5.0), ("p", 5, 7.0), ("q", 0, 9.0))
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    for _ in range(2):
        record_parents(tmp_path, record)
        assert placeholders.training_of_parents(tmp_path).splitlines() == [
            "| of its training | p | q | p, 2 K/V heads |", "| --- | --- | --- | --- |",
            "| 50% | 6.000 and 7.000 | – | 13.000 |", "| 100% | 6.000 ± 1.000 | 9.000 | 12.000 |",
        ]  # fmt: skip
    record.write_text(record.read_text().replace("5.0", "5.1"))
    with pytest.raises(click.ClickException, match=r"p has another parent 0 than .*: its loss is 5.0000, not 5.1000"):
        record_parents(tmp_path, record)


def test_results_of_distil_on_text_kinds_are_added(tmp_path):
    record, results = tmp_path / "record.jsonl", tmp_path / "results.jsonl"
    old = {"start": "default", "distilled_on": "chat", "lr": 2e-4, "tokens": 1}
    record.write_text(json.dumps(old) + "\n" + json.dumps(old | {"distilled_on": None, "lr": None}) + "\n")
    results.write_text(json.dumps(old | {"tokens": 2}) + "\n")
    add_distilled(results, record)
    assert [(each["distilled_on"], each["tokens"]) for each in results_of.read_lines(record)] == [
        (None, 1),
        ("chat", 2),
    ]


def test_table_by_tokens_per_parameter(tmp_path):
    """The default's gap and its share of the mean's, of each plan's own parents."""
    for plan, parent_loss, seeds in (("refine", 4.0, (0, 1)), ("refine_longer", 3.5, (0,)), ("twenty", 3.0, (0,))):
        lines = [line("parent", seed, parent_loss, groups=8, convert=None) for seed in seeds]
        for groups in (4, 2, 1):
            own = ((arm, parent_loss + beyond) for arm, beyond in (("mean", 2.0), ("refined 65536", 0.4 / groups)))
            lines += [line(arm, seed, loss, groups=groups) for arm, loss in own for seed in seeds]
            lines.append(line("refined 65536", 0, 0.0, groups=groups, stage=(0.01, "distill", 1e-3)))
        for each in lines:
            each["parent_loss"] = parent_loss
        (tmp_path / f"{plan}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert placeholders.tokens_per_parameter(tmp_path).splitlines()[2:] == [
        "| 1 | 2 | 4.000 | 0.100, 5.0% | 0.200, 10.0% | 0.400, 20.0% |",
        "| 7 | 1 | 3.500 | 0.100, 5.0% | 0.200, 10.0% | 0.400, 20.0% |",
        "| 20 | 1 | 3.000 | 0.100, 5.0% | 0.200, 10.0% | 0.400, 20.0% |",
    ]


def test_a_place_of_a_page_that_names_nothing(tmp_path):
    with pytest.raises(click.ClickException, match="the placeholder results_fomer of a page names no table"):
        page.renewed("<!-- results_fomer -->\n| old |\n<!-- end -->\n", tmp_path)


def test_the_best_of_several_trained_parts():
    """The part belongs to the setting: two parts at one rate are not averaged, and the better is named."""
    stage = (0.01, "distill", 1e-3)
    lines = [
        line("parent", 0, 4.0, groups=4, convert=None), line("mean", 0, 6.0),
        line("mean", 0, 4.3, stage=stage, part="kv"), line("mean", 0, 4.2, stage=stage, part="attention"),
        line("mean", 0, 4.4, stage=(0.01, "distill", 5e-4), part="kv"),
    ]  # fmt: skip
    first, rates, *_ = "\n\n".join(table.tables(lines)).split("\n\n")[1:]
    assert "| mean | 6.0000 | 100.0% | 4.2000 (lr 0.001, attention) |" in first
    assert rates.splitlines()[2:] == [
        "| wsd, 1,024 tokens per step, kv | 4.400 | 4.300 |", "| wsd, 1,024 tokens per step, attention | – | 4.200 |",
    ]  # fmt: skip


def test_table_by_parent():
    """At the best rate; a share is of the gap of that parent's mean right after conversion."""

    def of(parent, arm, held_out, groups=2, stage=(0, None, None), convert=("--method", "mean")):
        return line(arm, 0, held_out, groups=groups, stage=stage, convert=convert) | {"parent": parent}

    trained = (0.01, "distill", 1e-4)
    lines = [
        of("phi", "parent", 4.0, 8, convert=None), of("phi", "mean", 5.0), of("phi", "default", 4.1),
        of("phi", "mean", 4.4, stage=trained), of("phi", "default", 4.05, stage=trained),
        of("phi", "default", 4.2, stage=(0.01, "distill", 1e-3)),
        of("phi", "mean", 6.0, 1), of("glm", "mean", 4.5), of("glm", "default", 4.1),
    ]  # fmt: skip
    assert page_tables.by_parent([{"trainable": None, **each} for each in lines]).splitlines() == [
        "| family | K/V heads | parent | mean | default | mean, α 0.01 | default, α 0.01 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| phi | 8 → 2 | 4.0000 | 5.0000 | 4.1000 (10.0%) | 4.4000 (40.0%) | 4.0500 (5.0%) |",
        "| glm | 8 → 2 | 4.0000 | 4.5000 | 4.1000 (20.0%) | – | – |",
        "| phi | 8 → 1 | 4.0000 | 6.0000 | – | – | – |",
    ]


def test_table_of_behaviours():
    def behaving(seed, losses, tokens, repeated):
        behaviour = {"positions": [16, 32], "loss_by_position": losses, "parents_loss_by_position": [4.0, 3.0]}
        behaviour |= {"tokens_until_they_part": tokens, "repeated": repeated}
        return line("mean", seed, 5.0, stage=(0.01, "distill", 1e-3)) | {"behaviour": behaviour}

    lines = [behaving(0, [4.5, 3.5], 3, 0.2), behaving(1, [4.7, 3.1], 6, 0.4)]
    assert table.behaviours(lines).splitlines() == [
        "| arm | uptraining | 1–16 | 17–32 | tokens until they part | repeated |",
        "| --- | --- | --- | --- | --- | --- |",
        "| mean | distill, α 0.01 | +0.600 | +0.300 | 4.5 | 30% |",
    ]


def test_table_of_text_kinds():
    def evaluated(arm, prose, code):
        return line(arm, 0, prose, convert=None if arm == "parent" else (arm,)) | {
            "text_kinds": {"prose": prose, "code": code}
        }

    lines = [evaluated("parent", 3, 2), evaluated("mean", 8, 7), evaluated("shipped 16384", 3.5, 2.2)]
    lines += [evaluated("prose 16384", 3.4, 6), evaluated("code 16384", 7, 2.3)]
    assert table.text_kinds(lines).splitlines() == [
        "| held-out texts | parent | mean | shipped 16384 | own 16384 |",
        "| --- | --- | --- | --- | --- |",
        "| prose | 3.000 | 8.000 | 10.0% | 8.0% |",
        "| code | 2.000 | 7.000 | 4.0% | 6.0% |",
        "| worst |  |  | 10.0% | 8.0% |",
    ]


def test_table_of_text_kinds_by_parent():
    def evaluated(parent, arm, groups, prose, code):
        measured = line(arm, 0, prose, groups=groups, convert=None if arm == "parent" else (arm,))
        unknown = 6.1 if arm == "parent" else 6.0
        return measured | {"parent": parent, "text_kinds": {"prose": prose, "code": code, "chinese": unknown}}

    lines = [
        evaluated("phi", "parent", 4, 3, 2),
        evaluated("phi", "mean", 2, 4, 4), evaluated("phi", "default", 2, 3.1, 2.4),
        evaluated("phi", "mean", 1, 5, 6), evaluated("phi", "default", 1, 4, 3),
        evaluated("glm", "parent", 4, 3, 2),
        evaluated("glm", "mean", 2, 5, 4), evaluated("glm", "default", 2, 4, 3.5),
        evaluated("glm", "mean", 1, 5, 4), evaluated("glm", "default", 1, 5, 4),
    ]  # fmt: skip
    assert page_tables.text_kinds_by_parent(lines).splitlines() == [
        "| 4 → 2 / 1 heads | phi | glm |",
        "| --- | --- | --- |",
        "| prose | 10.0% / 50.0% | 50.0% / 100.0% |",
        "| code | 20.0% / 25.0% | 75.0% / 100.0% |",
        "| average | 15.0% / 37.5% | 62.5% / 100.0% |",
        "| worst | 20.0% / 50.0% | 75.0% / 100.0% |",
    ]


@pytest.mark.parametrize("name", page.PAGES, ids=str)
def test_the_pages_tables_are_the_recorded_results(name):
    root = Path(__file__).parents[2]
    written = (root / name).read_text()
    assert page.PLACEHOLDER.findall(written)
    assert page.renewed(written, root / page.RESULTS) == written
    changed = written.replace("| 8 → 2 |", "| 8 → 3 |").replace("| mean |", "| mode |")
    assert page.renewed(changed, root / page.RESULTS) == written


def test_no_line_of_a_figure_leads_to_a_point_without_training():
    """The mean's loss falls from 1.4 nats to 0.09 somewhere before 1 %; a line would show a place for that."""
    results = Path(__file__).parents[2] / page.RESULTS
    for figure in (drawing.headline(results), drawing.weak(results)):
        lengths = [tuple(curve[0].get_xdata()) for axes in figure.axes[-2:] for curve in axes.containers]
        assert (0,) in lengths
        assert all(of_curve == (0,) or 0 not in of_curve for of_curve in lengths)


def test_the_legend_of_decoding_covers_no_point():
    figure = drawing.speed(Path(__file__).parents[2] / page.RESULTS)
    figure.draw_without_rendering()
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_legend() is None
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0


@pytest.mark.parametrize("name", sorted(drawing.SOURCES))
def test_the_figures_are_of_the_recorded_results(name):
    from PIL import Image

    results = Path(__file__).parents[2] / page.RESULTS
    assert set(drawing.SOURCES) == {path.name for path in results.glob("*.png")}
    assert Image.open(results / name).text["Source"] == drawing.digest(results, name)
