"""The README's table of figures, and that of the docs on a GPU, written from what the benchmarks have kept.

    rondo bench table [--results FOLDER] [--into README.md] [--gpu-into docs/speed.md]

Each benchmark's last run lies in `benchmarks/results/` with its command, machine, load and versions. A row says what was measured
against what, the figure, and the command that measured it with the load of the machine before and after (processes that ran or
waited, over a minute). A benchmark without a kept run has no row; what `rondo bench gpu` has not run yet says so. A table stands
between two comments of its page, and nothing else of the page is touched.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gpu_parts import rows as on_gpu

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures: written by `rondo bench table` -->", "<!-- end of figures -->"
"""In the README and, of what `rondo bench gpu` found, in docs/speed.md."""

Figures = Any
"""What a benchmark printed last."""
Row = tuple[str, str]
"""(what was measured and against what, the figure)"""


def start(f: Figures) -> Iterator[Row]:
    seconds, seeds = f["seconds"], ", ".join(map(str, f["seeds"]))
    pairs = zip(f["reward_before"], f["reward_after"], strict=True)
    yield (
        f"quick start, seeds {seeds}: reward of sampled answers on held-out prompts, under the warmed-up policy and at the end",
        ", ".join(f"{before:.3f} to {after:.3f}" for before, after in pairs),
    )
    warm_up_s = seconds["warmed up"] - seconds["warms up"]
    yield (
        f"its seconds from the command to the first trained step (warm-up of {warm_up_s:.1f} s included); to the end",
        f"{seconds['first step']:.1f} s; {seconds['ended']:.0f} s",
    )
    yield "samples trained, lost, trained twice in these runs", _sums(f, "trained", "lost", "trained_twice")


def _sums(f: Figures, *outcomes: str) -> str:
    return ", ".join(f"{sum(f[f'samples_{outcome}']):,.0f}" for outcome in outcomes)


def chaos(f: Figures) -> Iterator[Row]:
    cells = {(role, fault): cell for role, row in f["roles"].items() for fault, cell in row.items()}
    kills = {role: cell for (role, fault), cell in cells.items() if fault == "sigkill"}
    seen = [cell["worst_detect_s"] * 1e3 for role, cell in kills.items() if role != "scheduler"]
    silent = [cell["worst_detect_s"] for role, cell in kills.items() if role == "scheduler"]
    unseen = "".join(f"; a scheduler in SGLang's server, of whose death nobody is told, {s:.1f} s" for s in silent)
    loads = [cell["load"] for cell in cells.values() if "load" in cell]
    at = f" (at loads of {min(loads):.0f} to {max(loads):.0f})" if loads else ""
    yield (
        f"SIGKILL of each kind of process, ten times each, in runs of the quick start{at}: the latest of each seen after",
        f"{min(seen):.0f} to {max(seen):.0f} ms{unseen}",
    )
    yield "ready again after, median", ", ".join(f"{role} {cell['back_s']:.1f} s" for role, cell in kills.items())
    hangs = [cell["worst_detect_s"] for (_, fault), cell in cells.items() if fault in ("sigstop", "hang")]
    yield (
        "those and exceptions, hangs in C code and collectives, SIGSTOP, memory and disks that end "
        f"({len(cells)} kinds of death): samples lost, trained twice; most steps repeated; latest hang seen",
        f"{sum(cell['lost'] for cell in cells.values())}, {sum(cell['twice'] for cell in cells.values())}; "
        f"{max(cell['steps_repeated'] for cell in cells.values())}; {max(hangs):.0f} s",
    )


def scale(f: Figures) -> Iterator[Row]:
    changes = {name: row for name, row in f.items() if isinstance(row, dict) and "ended_as" in row}
    until = {
        "scale_out": ("serve_s", "new replicas under load: until all serve proved weights"),
        "scale_in": ("gone_s", "replicas that leave under load: until they are gone"),
    }
    for action, (name, words) in until.items():
        yield (
            f"{words}; with somebody killed in the middle",
            "; ".join(
                f"{role} {changes[f'{role} {action} quiet'][name]:.1f} s, {changes[f'{role} {action} killed'][name]:.1f} s"
                for role in ("rollout", "reference")
            ),
        )
    quiet = max(row["worst_pause_s"] for name, row in changes.items() if name.endswith("quiet"))
    killed = statistics.median(row["pause_s"] for name, row in changes.items() if name.endswith("killed"))
    yield (
        f"samples lost, trained twice in these {f['rounds']} rounds; the trainer's longest step beyond its usual one, where "
        "nobody is killed, and median where somebody is",
        f"{f['lost']}, {f['twice']}; {quiet:.1f} s, {killed:.1f} s",
    )


def soak(f: Figures) -> Iterator[Row]:
    yield (
        f"quick start for {f['minutes']:g} minutes in which something dies every {f['every_s']:g} s ({sum(f['killed'].values())} "
        f"deaths): mean reward of its first {f['reward']['steps']} steps, and where 95 of 100 runs without deaths have theirs",
        f"{f['reward']['soak']:.3f}; {f['reward']['low']:.3f} to {f['reward']['high']:.3f}",
    )
    growing = [
        f"{what} of {kind}" for kind, row in f["growth"].items() for what, each in row.items() if not each["flat"]
    ]
    yield (
        f"samples lost, trained twice there ({f['samples_trained']:,} trained); left behind; what grows of memory, descriptors, "
        f"threads of {len(f['growth'])} kinds of process",
        f"{f['samples_lost']}, {f['samples_trained_twice']}; {len(f['left']) or 'nothing'}; {', '.join(growing) or 'nothing'}",
    )


def rewards(f: Figures) -> Iterator[Row]:
    yield (
        "reward hub, cases that the sources of its checkers publish: scored as they do, of all; rows/s a core",
        "; ".join(f"{name} {of['agree']} of {of['cases']}, {of['rows_per_s']:,}" for name, of in f["checkers"].items()),
    )
    pools = f["hostile"] if isinstance(f["hostile"], list) else [f["hostile"]]
    yield (
        f"{pools[0]['answers']:,} answers made to hold a checker up, through a pool of {pools[0]['workers']} workers: hung, "
        "killed their worker, raised; median, p99, slowest",
        ". ".join(
            f"`{pool['checker']}` {pool['hung']}, {pool['crashed']}, {pool['raised']}; {pool['median_ms']:.1f} ms, "
            f"{pool['p99_s']:.1f} s, {pool['slowest_s']:.1f} s"
            for pool in pools
        ),
    )


def autoscale(f: Figures) -> Iterator[Row]:
    told = [
        f"{name} {row['rondo']['out']}, {row['rondo']['in']}, {row['rondo']['turns']}, {row['rondo']['above']:.1%}, "
        f"{row['rondo']['replica_hours'] / row['best_fixed']['replica_hours']:.2f}x"
        for name, row in f["scenarios"].items()
    ]
    yield (
        "autoscaler in a simulated run of three hours, by load: times larger, smaller, turned back within ten minutes; share of "
        "time with the trainer waiting more than 10 %; replica hours over those of the best fixed size, which knows the load",
        "; ".join(told),
    )


def calls(f: Figures) -> Iterator[Row]:
    of, over = f["systems"], f["ours_p50_over"]
    yield (
        f"actor call, p50 (bare uvloop echo in the same run: {of['floor']['p50_us']:.1f} us)",
        f"{of['ours']['p50_us']:.0f} us; beside a busy Python thread {of['busy']['p50_us']:.0f} us",
    )
    peers = [name for name in of if name not in ("floor", "ours", "busy")]
    if peers:
        yield (
            "the same call of an async actor in " + " and ".join(name.title() for name in peers),
            ", ".join(f"{of[name]['p50_us']:.0f} us ({1 / over[name]:.0f}x ours)" for name in peers),
        )


def trl(f: Figures) -> Iterator[Row]:
    told = []
    for case, report in f["results"].items():
        if "ratio" in report:
            best = report["ratio_to"]
            told.append(
                f"{case} {report['ours']['step_s']:.2f} s to {report[best]['step_s']:.2f} s "
                f"({report['ratio']:.2f}x, {_way(best)})"
            )
    if told:
        yield (
            "whole step against TRL's GRPOTrainer, 9.2 M parameters, one list of answer lengths for both, the same wait policy "
            "of threads, both cores, hybrid, one version stale; against the quicker of its ways to generate",
            "; ".join(told),
        )


def trl_pretrained(f: Figures) -> Iterator[Row]:
    for report in f["results"].values():
        sides = {"ours": "ours"} | ({"TRL": report["ratio_to"]} if "ratio" in report else {})
        parts = []
        for name, side in sides.items():
            rewards = report[side]["reward_by_step"][0]
            curve = " ".join(f"{reward:.2f}" for reward in rewards)
            parts.append(f"{name} {report[side]['step_s']:.1f} s a step, reward by step {curve}")
        yield (
            "a pretrained model of 135 M parameters (SmolLM2-135M-Instruct) learns sums through its chat template, 64 samples a "
            "step, sampled freely by both sides",
            "; ".join(parts) + (f" ({report['ratio']:.2f}x, {_way(report['ratio_to'])})" if "ratio" in report else ""),
        )


def _way(side: str) -> str:
    return "its continuous batching" if "continuous" in side else "its `generate`"


def shared_prompts(f: Figures) -> Iterator[Row]:
    yield (
        "forward and backward of a step whose prompts are computed once for all of their 8 samples, over whole samples: tokens "
        "of a prompt, answers of 64 tokens",
        ", ".join(f"{name.replace('_', ' ')} {case['ratio']:.2f}x" for name, case in f["results"].items()),
    )


def tree(f: Figures) -> Iterator[Row]:
    yield (
        "forward and backward of rows that begin alike, together over row by row: 8 samples of 6 turns, a session with 4 "
        "branches, and rows as in AReaL's tau2 example at a sixteenth of its lengths, which it does not publish: not to be "
        "compared with the 7x that it publishes for GPUs and its own packing",
        ", ".join(f"{name} {case['ratio']:.2f}x" for name, case in f["results"].items()),
    )


def paper(f: Figures) -> Iterator[Row]:
    yield (
        "a step at the scale of arXiv 2604.11554 by replay (roles wait for published or assumed stage times instead of "
        "computing; rows, media, rounds, commits, snapshots and weights are real and count): of what the slowest stage allows",
        f"4B {f['of_bound_4b']:.1%}, omni 30B {f['of_bound_omni']:.1%}; colocate {f['of_bound_colocate']:.1%}",
    )
    yield (
        "fully_async over colocate there, which follows from the stage times; the trainer's wait for data",
        f"{f['speedup_4b']:.2f}x and {f['speedup_omni']:.2f}x; {f['data_wait_share']:.3%} of a step",
    )


def generation(f: Figures) -> Iterator[Row]:
    told = []
    for size, loads in f["sizes"].items():
        parts = [
            f"{load} {max(row['ratio_to_generate'] for name, row in engines.items() if name != 'generate'):.2f}x"
            for load, engines in loads.items()
        ]
        told.append(f"{size} {', '.join(parts)}")
    yield f"embedded engine over transformers' `generate`, tokens a CPU second, {f['dtype']}", "; ".join(told)


def serve(f: Figures) -> Iterator[Row]:
    rates, over = f["tokens_per_s"], f["ratio"]
    loads = ", ".join(rates["engine"])

    def shares(name: str) -> str:
        return ", ".join(f"{value:.2f}x" for value in over[name].values())

    inverse = ", ".join(f"{1 / value:.2f}" for value in over["serve"].values())
    yield (
        f"`rondo serve` over its engine without HTTP, tokens/s at {loads} in flight, 0.3 M parameters, one thread",
        inverse,
    )
    yield "the engine over transformers' continuous batching there", shares("continuous")
    if "sglang" in over:
        yield (
            "the engine over SGLang there, whose CPU path is `torch_native` attention without compiled kernels, which is not "
            "what it is made for",
            shares("sglang"),
        )


def faults(f: Figures) -> Iterator[Row]:
    rows = {name: row for name, row in f["rows"].items() if name not in ("none", "slow updates")}
    quiet_s = f["rows"]["none"]["update_s"]
    slowest = max(row["update_s"] / quiet_s for row in rows.values())
    yield (
        f"{f['servers']} stub servers, {f['in_flight']} requests in flight; one answers 500, is full, dead, hung, does not come "
        "back, or one request poisons them: other requests failed; the next update over one with all well",
        f"{sum(row['failed'] for row in rows.values())}; {slowest:.2f}x",
    )


def strangers(f: Figures) -> Iterator[Row]:
    found = f["strangers"]
    yield (
        "`rondo serve`, 64 honest requests in flight, alone and beside 1,000 hostile ones of twenty kinds: p99; failed",
        f"{found['quiet']['p99_s']:.2f} s and {found['hostile']['p99_s']:.2f} s ({found['p99_ratio']:.2f}x); "
        f"{sum(found['hostile']['failed'].values())} of {found['hostile']['requests']:,}",
    )
    agents = f["agents"]
    recorded = agents["recorded"]
    yield (
        f"{recorded['num_sessions']} agents whose context grows: turns recorded; bytes a new token",
        f"{recorded['num_calls']:,} of {agents['asked']:,}; {agents['bytes_per_new_token']:.0f}",
    )


def dispatch(f: Figures) -> Iterator[Row]:
    loads = {name: row["ratio"] for name, row in f["loads"].items()}
    yield (
        "rondo's client and dispatcher over a bare load generator, tokens/s",
        ", ".join(f"{name} {ratio:.2f}" for name, ratio in loads.items()),
    )


def ring(f: Figures) -> Iterator[Row]:
    for name, row in f.items():
        if isinstance(row, dict) and "two processes" in row:
            two = row["two processes"]
            yield (
                f"ring: {name} a put, {row['row_bytes'] / 1e3:,.1f} kB a row, between two processes",
                f"{two['rows_per_s']:,} rows/s, {two['cpu_us_per_row']:.1f} us of CPU a row, {two['of_memcpy']:.0%} of a memcpy",
            )


def bus(f: Figures) -> Iterator[Row]:
    def peer(name: str) -> str:
        ratio = f[f"{name}_vs_transferqueue"]
        return f"; {ratio:.0f}x TransferQueue 0.1.11, as warm and with as many rows" if ratio else ""

    yield (
        "bus as roles use it (lease, put, round, commit; journal on), 28 kB rows, 64 a put, against one memcpy",
        f"{f['text_rows_s'] / 1e3:.1f} k rows/s, {f['text_cpu_us_per_row']:.1f} us of CPU a row, {f['text_of_limit']:.0%}"
        + peer("text"),
    )
    yield (
        "the same, 7 MB rows, 4 a put; 3 kB rows, one a put",
        f"{f['mm_rows_s'] / 1e3:.2f} k rows/s, {f['mm_of_limit']:.0%}{peer('mm')}; {f['stream_rows_s'] / 1e3:.1f} k rows/s",
    )
    yield (
        "one 3 kB row, put to readable by a consumer that waits; over a bare echo through two doorbells",
        f"p50 {f['row_p50_us']:.0f} us, p99 {f['row_p99_us']:.0f} us; {f['row_p50_of_floor']:.1f}x",
    )
    yield (
        "a step's lease, put, claim and commit with 100,000 rows held, over 1,000; status",
        f"{f['growth_100k']:.2f}x; {f['status_100k_ms']:.2f} ms",
    )
    yield (
        "coordinator, processor time of one sample's put, 1,024 prompt groups open, 64 ranks and a replica waiting; where every "
        "whole group becomes a round for all ranks",
        f"{f['coordinator_put_ms_1024']:.2f} ms; {f['coordinator_put_and_answer_ms_1024']:.2f} ms",
    )


def weights(f: Figures) -> Iterator[Row]:
    for name, row in f["shared_memory"].items():
        yield (
            f"weights, {row['bytes'] / (1 << 30):.0f} GiB, to one reader over shared memory, proved, {name}; copied only",
            f"{row['proved_gb_s']:.1f} GB/s, {row['of_memcpy']:.0%} of a memcpy of as many threads; {row['copy_gb_s']:.1f} GB/s",
        )
    shares = ", ".join(f"{name.removeprefix('lr ')} {row['share']:.1%}" for name, row in f["delta"].items())
    yield "exact delta of bfloat16 weights, of their bytes, at learning rate", shares


def fit(f: Figures) -> Iterator[Row]:
    for case in f["cases"].values():
        kinds = [f"{case['experts']} experts a layer"] * bool(case["experts"])
        kinds += ["layers computed again in the backward"] * case["checkpointing"]
        kinds += [f"{case['copies']} copies"] * (case["copies"] > 1)
        yield (
            f"the most that one of {case['ranks']} gloo ranks holds of {case['parameters'] / 1e9:.2f} B float32 parameters"
            f"{''.join(f', {kind}' for kind in kinds)}, {case['rows'] * case['tokens']:,} tokens a micro-batch, over what it "
            "must: while it loads, in a step, while it publishes; traced before, over the step's",
            ", ".join(f"{case[f'{part}_ratio']:.2f}x" for part in ("load", "step", "publish"))
            + f"; {1 + case['trace_error']:.2f}x",
        )


def omni(f: Figures) -> Iterator[Row]:
    yield (
        "sums of digits, reward on held-out rows",
        "; ".join(f"{name} {row['reward_before']:.3f} to {row['reward_after']:.3f}" for name, row in f.items()),
    )
    gap = max(row["gap_float32"] for row in f.values())
    yield "largest gap of a step between the engine's and the trainer's log-probs there, float32", f"{gap:.0e} nats"


def media(f: Figures) -> Iterator[Row]:
    yield (
        f"{f['images']} images of 12 megapixels in flight: memory above idle, main process and workers; decoded they are",
        f"{f['peak_main_mib']:.0f} MiB and {f['peak_workers_mib']:.0f} MiB; {f['decoded_mib']:,.0f} MiB",
    )
    yield (
        f"bytes on the bus of a prompt group of {f['samples']} with an image, over {f['samples']} times those of a sample",
        f"{f['ratio']:.3f}",
    )


def experts(f: Figures) -> Iterator[Row]:
    if meshes := f.get("meshes"):
        worst = [max(of[name] for of in meshes.values()) for name in ("grad_diff", "loss_diff", "norm_diff")]
        yield (
            f"experts over 4 gloo ranks ({', '.join(meshes)}) against one process: largest difference of a gradient, the loss, "
            "the norm; state after ep 2 -> 1 -> 2; the all-to-alls' part of a step, ranks waiting in them on two cores",
            f"{', '.join(f'{each:.0e}' for each in worst)}; {'equal to the bit' if f['ep_reshard_equal'] else 'different'}; "
            + ", ".join(f"{of['exchange_share']:.0%}" for of in meshes.values()),
        )
    if learnt := f.get("learnt"):
        of_seeds = [[of["gaps"][where] for of in learnt.values()] for where in ("one process", "2 x 2 ranks")]
        yield (
            f"router replay (R3): log-prob gap of a float32 trainer and an engine in {f['engine']}, without and with it, of "
            f"mixtures that have learnt to write bytes, mean of {len(learnt)} seeds, in one process; on 2 x 2 ranks",
            "; ".join(
                "{:.4f} and {:.4f} nats".format(
                    *(statistics.mean(g[name] for g in gaps) for name in ("without", "with"))
                )
                for gaps in of_seeds
            )
            + f" ({f['r3_gap_reduction']:.0%} less)",
        )
        names = ("less_with_routes", "less_with_weights", "less_with_outputs")
        yield (
            "how much less the gap of two forwards in these precisions is with the routes of the other, its weights of experts "
            "too, the outputs of its layers of experts, beyond which no replay goes; routes that the two choose apart",
            ", ".join(f"{statistics.mean(of[name] for of in learnt.values()):.0%}" for name in names)
            + f"; {statistics.mean(of['routes_apart'] for of in learnt.values()):.1%}",
        )
    if "pairs" in f:
        yield (
            f"its cost, of a step's processor time ({f['pairs']} pairs, 95 % interval)",
            f"{f['r3_cost_median']:.1%} ({f['r3_cost_lower']:.1%} to {f['r3_cost_upper']:.1%})",
        )
    if told := f.get("memory"):
        yield (
            f"the most that one of 4 ranks holds in a step of {f['parameters'] / 1e9:.2f} B parameters, 16 experts a layer, by "
            "`ep`; traced before, over that",
            "; ".join(
                f"{n} {of['step_bytes'] / 2**20:,.0f} MiB, {1 + of['trace_error']:.2f}x" for n, of in told.items()
            ),
        )


def staleness(f: Figures) -> Iterator[Row]:
    yield (
        "quick start by `max_staleness`, three seeds each, runs kept in docs/staleness.csv: reward of the last tenth of 100 "
        "steps; steps a second",
        ", ".join(f"{name}: {row['reward']:.3f}; {row['steps_per_s']:.1f}" for name, row in f.items()),
    )


def algorithms(f: Figures) -> Iterator[Row]:
    yield (
        "quick start by algorithm, `max_staleness` behind its mode, runs kept in docs/algorithms.csv: gain of the sampled reward "
        "of held-out prompts, mean of (so many) seeds. Cells come from several invocations, most of them on a busy machine: the "
        "command and its load are those of the last",
        "; ".join(
            f"{name} "
            + ", ".join(f"{mode} {statistics.fmean(of['gain']):.2f} ({len(of['gain'])})" for mode, of in modes.items())
            for name, modes in f.items()
        ),
    )


def lora(f: Figures, base: str = "quick start's base") -> Iterator[Row]:
    steps = [int(end) for end in f["full"]["reward_by_step"]]

    def told(side: str, size: str) -> str:
        *_, reward = f[side]["reward_by_step"].values()
        (before, after), *_ = f[side]["held_out"]
        return f"{reward:.2f}, {before:.2f} to {after:.2f}, {f[side]['step_s']:.2f} s, {f[size]:,}"

    yield (
        f"{base}, the whole model and then adapters, seed 0, {steps[-1]} steps: reward of the last {steps[0]}, of held-out "
        "prompts, time of a step, bytes of a version",
        f"{told('full', 'full_bytes')}; {told('lora', 'adapter_bytes')}",
    )


def pretrained(f: Figures) -> Iterator[Row]:
    told = []
    for name, of in f.items():
        if name != "steps":
            last = statistics.fmean(statistics.fmean(rewards[-5:]) for rewards in of["rewards"])
            before, after, step_s = (statistics.fmean(of[key]) for key in ("before", "after", "step_s"))
            told.append(f"{name} {last:.2f}, {before:.2f} to {after:.2f}, {step_s:.1f} s")
    yield (
        "SmolLM2-135M-Instruct on sums of two numbers, by algorithm with equal settings; `distillation` is by the copy that GRPO "
        f"trained, without rewards. {f['steps']} steps: reward of the last 5, of held-out prompts, time of a step",
        "; ".join(told),
    )


def recipes(f: Figures) -> Iterator[Row]:
    kinds = [(name, f[name]) for name in ("image", "audio", "video", "mixed") if name in f]
    yield (
        f"recipes on rows of their data's form, tiny models, {f['digits']} digits: reward of held-out rows before and after "
        f"{f['steps']} steps, a value a seed",
        "; ".join(f"{name} {_each(found['before'])} to {_each(found['after'])}" for name, found in kinds),
    )


def _each(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def data(f: Figures) -> Iterator[Row]:
    def told(name: str) -> str:
        of = f[name]
        held = " and ".join(f"{of[at] - of['before_mb']:.0f}" for at in ("opened_mb", "read_mb"))
        used = f" ({of['start_cpu_s']:.1f} s of processors at load {of['load']:.1f})" if of["start_cpu_s"] > 1 else ""
        return f"{of['start_s']:.2f} s{used}, {of['ms_a_row']:.2f} ms, {held} MB"

    yield (
        f"{f['rows'] / 1e6:,.0f} million rows in JSONL ({f['jsonl_bytes'] / 1e9:.1f} GB), all shuffled, for the first time, "
        "which makes the index, and later: seconds to the first row; processor time of a row; memory of opening and of reading",
        f"{told('jsonl_first')}; {told('jsonl')}; of one file {told('jsonl_one_first')}; {told('jsonl_one')}",
    )
    yield (
        f"the same in parquet, for the first time, which makes an Arrow file of it ({f['arrow_bytes'] / 1e9:.1f} GB), and later",
        f"{told('parquet_first')}; {told('parquet')}; of one file {told('parquet_one_first')}; {told('parquet_one')}",
    )
    run, both = f["run"], f["resume_exact"]
    yield (
        f"a reader that is killed and goes on ({', '.join(both)}); a run killed behind step {run['killed_behind_step']} with "
        f"all of its processes and resumed, over parquet: rows of {run['steps']} steps that it trains otherwise",
        f"{'the same rows' if all(both.values()) else 'other rows'}; {'none' if run['equal'] else 'some'} of {run['rows']}",
    )


def gsm8k(f: Figures) -> Iterator[Row]:
    def ends(name: str) -> str:
        """Of a third of the steps at either end, where a few samples are right."""
        third = max(1, len(f[name]) // 3)
        return f"{statistics.fmean(f[name][:third]):.3f} to {statistics.fmean(f[name][-third:]):.3f}"

    yield (
        f"SmolLM2-135M-Instruct on short whole problems of GSM8K, {f['steps']} steps of 32 samples by the hub's rewards: right "
        "answers, form, cut off, of the first and the last third; reward of held-out problems before and after; time of a step",
        f"{ends('right')}, {ends('form')}, {ends('cut_off')}; {f['before']:.3f} to {f['after']:.3f}; {f['step_s']:.1f} s",
    )


def distill(f: Figures) -> Iterator[Row]:
    def told(name: str, of: dict[str, list[Any]]) -> str:
        steps = ", ".join("not reached" if step is None else str(step) for step in of["steps_to"])
        pairs = zip(of["before"], of["after"], strict=True)
        return f"{name} {steps} ({', '.join(f'{before:.2f} to {after:.2f}' for before, after in pairs)})"

    yield (
        "quick start with rewards alone, a teacher 4 times its size alone, both, and that teacher's 8 likeliest tokens: steps to "
        f"a mean reward of {f['reward']:g}, a seed each (reward of held-out prompts before and after {f['steps']} steps)",
        "; ".join(told(name, of) for name, of in f.items() if name not in ("reward", "steps")),
    )


def curriculum(f: Figures) -> Iterator[Row]:
    def told(name: str, of: dict[str, list[Any]]) -> str:
        steps = ", ".join("not reached" if step is None else str(step) for step in of["steps_to"])
        before, after = (statistics.fmean(of[when]) for when in ("before", "after"))
        return f"{name} {steps} ({before:.2f} to {after:.2f})"

    yield (
        f"quick start's task in data of which a third teach: steps to a reward of {f['reward']:g} on the same held-out prompts, "
        f"measured every five, a seed each (means before and after {f['steps']} steps)",
        "; ".join(told(name, of) for name, of in f.items() if isinstance(of, dict)),
    )


def agents(f: Figures) -> Iterator[Row]:
    yield (
        f"{f['episodes_open']:,} episodes open at once, tools of 0.1 to 30 s, two replicas whose engines wait in the place of "
        "computing: slots used while work waits; a turn beside engine and tool; memory an episode",
        f"{f['slots_used']:.1%}; {(f['turn_cpu_us'] - f['engine_cpu_us']) / 1e3:.2f} ms of CPU; {f['episode_kb']:.0f} kB",
    )
    yield (
        "episodes there, lost, counted twice; the same with a replica and one of its worker processes killed by SIGKILL",
        f"{f['episodes']:,}, {f['lost']}, {f['twice']}; {f['killed_episodes']:,}, {f['killed_lost']}, {f['killed_twice']}",
    )


def examples(f: Figures) -> Iterator[Row]:
    named = {name: of for name, of in f.items() if isinstance(of, dict)}
    yield (
        f"examples of agents as they are shipped, {f['digits']} digits: reward of held-out rows before and after, a value a seed",
        "; ".join(f"{name} {_each(of['before'])} to {_each(of['after'])}" for name, of in named.items()),
    )


def dashboard(f: Figures) -> Iterator[Row]:
    if lengths := f.get("lengths"):

        def each(name: str, form: str, unit: str = "s", scale: float = 1) -> str:
            return ", ".join(format(of[name] / scale, form) for of in lengths) + f" {unit}"

        yield (
            f"`rondo view` of runs of {each('steps', ',.0f', 'steps')}, ten samples a step: from the command until overview and "
            "twelve curves are there; bytes over the wire; with the index that the first look left",
            f"{each('first_s', '.1f')}; {each('first_bytes', '.0f', 'kB', 1e3)}; {each('again_s', '.1f')}",
        )
        yield (
            "until all steps are read; until the newest samples are there; twenty samples with a word that one in a thousand has",
            f"{each('all_s', '.1f')}; {each('samples_s', '.2f')}; {each('search_s', '.2f')}",
        )
    if run := f.get("run"):
        rates, pairs, trackers = (
            run["steps_per_s"],
            run["pairs"],
            [name for name in run["cpu_s"] if name != "dashboard"],
        )
        yield (
            f"a run at the paper's stage times over {run['time_scale']:g}, by turns without and with the dashboard, a page that "
            f"asks it, and {', '.join(trackers)}: steps/s; with over without ({len(pairs)} pairs of turns: least, greatest)",
            f"{rates['without']:.4f}, {rates['with']:.4f}; {run['share']:.2%} ({min(pairs):.2%}, {max(pairs):.2%})",
        )
        shares = ", ".join(f"{name} {value / run['with_s']:.2%}" for name, value in run["cpu_s"].items())
        yield "processor time of these readers there, of a core", f"{run['of_core']:.2%} ({shares})"


def track(f: Figures) -> Iterator[Row]:
    of_server = ", its server once" if "mlflow" in f else ""
    of_files = (
        ". W&B's offline files hold what it was told again in another folder, by equal step" if "wandb" in f else ""
    )
    yield (
        f"trackers killed at random moments beside a file that grows ({next(iter(f.values()))['kills']} times each{of_server}): "
        f"(step, name) that they are to tell; lost, told twice{of_files}",
        "; ".join(f"{name} {of['points']:,}; {of['lost']}, {of['repeated']:,}" for name, of in f.items()),
    )


def sglang_weights(f: Figures) -> Iterator[Row]:
    large = f.get("large") or f["tiny"]
    told = [
        f"{name} {row['seconds']:.1f} s" for name, row in large.items() if isinstance(row, dict) and "seconds" in row
    ]
    yield "new weights into a real SGLang server on the CPU, by path", ", ".join(told)


ROWS: tuple[tuple[str, Callable[[Figures], Iterator[Row]]], ...] = (
    ("start", start), ("chaos", chaos), ("scale", scale), ("soak", soak), ("faults", faults), ("strangers", strangers),
    ("rewards", rewards),
    ("autoscale", autoscale), ("calls", calls),
    ("trl", trl), ("trl_pretrained", trl_pretrained), ("shared_prompts", shared_prompts), ("tree", tree), ("paper", paper),
    ("generation", generation), ("serve", serve), ("dispatch", dispatch), ("sglang_weights", sglang_weights), ("ring", ring),
    ("bus", bus), ("weights", weights), ("fit", fit), ("omni", omni), ("media", media),
    ("experts", experts), ("experts_gap", experts), ("experts_memory", experts), ("staleness", staleness),
    ("algorithms", algorithms), ("lora", lora),
    ("lora_pretrained", functools.partial(lora, base="SmolLM2-135M-Instruct on sums of two numbers")),
    ("dashboard", dashboard), ("dashboard_beside", dashboard), ("track", track), ("track_mlflow", track),
    ("pretrained", pretrained), ("gsm8k", gsm8k), ("data", data), ("recipes", recipes), ("recipes_real", recipes),
    ("distill", distill), ("curriculum", curriculum), ("agents", agents), ("examples", examples),
)  # fmt: skip


def table(results: Path) -> str:
    """All rows, in Markdown, and under them on what they were measured."""
    lines = ["| what | figure | measured by; load before, after |", "|---|---|---|"]
    machines: dict[str, list[str]] = {}
    for name, rows in ROWS:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        kept = orjson.loads(path.read_bytes())
        figures = kept["figures"]  # they name a command where they are of several, each of a part of it
        by = f"`{figures.get('command', kept['command'])}`; {kept['load_before'][0]:.1f}, {kept['load_after'][0]:.1f}"
        for number, (what, figure) in enumerate(rows(figures)):
            lines.append(f"| {what} | {figure} | {'as above' if number else by} |")
        machines.setdefault(_machine(kept), []).append(name)
    told = [f"{', '.join(names)}: {machine}" for machine, names in machines.items()]
    return "\n".join([*lines, "", *([f"Machine: {next(iter(machines))}."] if len(machines) == 1 else told)])


def _machine(kept: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    flags = "AVX-512" if any(flag.startswith("avx512") for flag in kept["flags"]) else ", ".join(kept["flags"])
    return f"{kept['processor']}, {kept['cores']} cores, {flags}; {versions}"


def written(page: str, figures: str) -> str:
    """The page with the table in its place. ValueError where it has none."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r}, got neither or one. Put them where the table goes")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--into", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--gpu-into", type=Path, default=HERE.parent / "docs" / "speed.md")
    options = parser.parse_args()
    pages = {options.into: table(options.results), options.gpu_into: on_gpu.table(options.results / "gpu.json")}
    for page, figures in pages.items():
        page.write_text(written(page.read_text(encoding="utf-8"), figures), encoding="utf-8")
        print(f"{page}\n\n{figures}\n")


if __name__ == "__main__":
    main()
