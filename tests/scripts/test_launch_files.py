"""The files that start many processes: keys that accelerate knows, shells that parse, and arguments passed on whole."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from commands import Result
from torch.distributed.run import get_args_parser

from model.common.launcher_variables import MESSAGES
from uptrain.distributed import launcher

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIGS = sorted((SCRIPTS / "launch/accelerate").glob("*.yaml"))
KINDS = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What must reach the processes: the stops of `uptrain run`."""
SHELLS = {"uptrain_multi_gpu.sh": "sh", "uptrain_multi_cpu.sh": "sh", "launch/slurm/uptrain.sbatch": "bash"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key(path):
    config = load_config_from_file(str(path))
    assert config.distributed_type == KINDS[path.stem]
    options = launch_command_parser().parse_args(["--config_file", str(path), "--num_processes", "2", "script.py"])
    for key in config.fsdp_config:
        assert hasattr(options, key), key


def test_fsdp2_reaches_the_processes():
    arguments = ["--config_file", str(SCRIPTS / "launch/accelerate/fsdp2.yaml"), "--num_processes", "2", "script.py"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert (options.use_fsdp, options.fsdp_version, options.num_processes) == (True, 2, 2)
    assert (options.fsdp_reshard_after_forward, options.fsdp_cpu_ram_efficient_loading) == (True, False)


@pytest.mark.parametrize("name", SHELLS)
def test_shells_parse(name):
    subprocess.run([SHELLS[name], "-n", SCRIPTS / name], check=True)


@pytest.fixture
def run_script(tmp_path):
    """Run a script where the programs it calls are stand-ins that print how they were called, an argument a line."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def stand_in(name: str, text: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    stand_in("nproc", "echo 13")
    launcher = 'echo launcher; echo $OMP_NUM_THREADS > $0.threads; shift 2; printf "%s\\n" "$@"'
    stand_in(
        "srun",
        'echo "srun $ACCELERATE_USE_FSDP"; printf "%s\\n" "$@"; [ -z "$STATE" ] || echo "$WRITES" > "$STATE"; '
        "exit ${CODE:-1}",
    )
    stand_in("scontrol", 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "scontrol $*"; fi')
    stand_in(
        "python",
        f'case $2 in *device_count*) echo 3;; *.launcher) {launcher};; *) printf "%s\\n" python "$@";; esac',
    )

    def run(name: str, *arguments: object, **variables: str) -> Result:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **variables}
        command = [SHELLS[name], SCRIPTS / name, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return Result(result.returncode, result.stdout, result.stderr)

    return run


@pytest.fixture
def shell(run_script):
    """Run a script as `run_script` does; return its exit code, and the lines that it printed on stdout."""

    def run(name: str, *arguments: object, **variables: str) -> tuple[int, list[str]]:
        result = run_script(name, *arguments, **variables)
        return result.code, result.out.splitlines()

    return run


@pytest.mark.parametrize(
    ("variables", "layout", "gpus"),
    [
        ({}, "fsdp2", "3"), ({"GPUS": "2"}, "fsdp2", "2"), ({"LAYOUT": "ddp"}, "ddp", "3"),
    ],
)  # fmt: skip
def test_multi_gpu(shell, variables, layout, gpus):
    code, lines = shell("uptrain_multi_gpu.sh", "run", "my model", "--alpha", "0.05", **variables)
    assert code == 0
    assert lines[:2] == ["launcher", "--config_file"]
    assert Path(lines[2]) == SCRIPTS / f"launch/accelerate/{layout}.yaml"
    assert lines[3:] == [
        "--num_processes", gpus, "--main_process_port", "0", "-m", "uptrain", "run", "my model", "--alpha", "0.05"
    ]  # fmt: skip


@pytest.mark.parametrize(("processes", "given", "expected"), [
    ("3", "", "4"), ("1", "", "13"), ("20", "", "1"), ("3", "2", "2"),
])  # fmt: skip
def test_processes_on_cpus_divide_the_cores(shell, tmp_path, processes, given, expected):
    shell("uptrain_multi_cpu.sh", "run", "MODEL", PROCESSES=processes, OMP_NUM_THREADS=given)
    assert (tmp_path / "bin/python.threads").read_text().strip() == expected


@pytest.mark.parametrize("layout", [{}, {"LAYOUT": "ddp"}])
def test_one_gpu_needs_no_launcher(shell, layout):
    """The launcher of a single process ends at a signal, and leaves the process running."""
    code, lines = shell("uptrain_multi_gpu.sh", "run", "my model", "--alpha", "0.05", GPUS="1", **layout)
    assert (code, lines) == (0, ["python", "-m", "uptrain", "run", "my model", "--alpha", "0.05"])


def test_multi_gpu_without_a_gpu(run_script):
    for wrong in ("0", "x", "-1", "4"):
        run_script("uptrain_multi_gpu.sh", "run", "MODEL", GPUS=wrong).refused(f"GPUS={wrong}")
    run_script("uptrain_multi_gpu.sh", "run", "MODEL", GPUS="2", LAYOUT="fsdp").refused("LAYOUT=fsdp is unknown")


def test_multi_cpu(shell):
    code, lines = shell("uptrain_multi_cpu.sh", "run", "my model", PROCESSES="3")
    assert code == 0
    assert lines[0] == "launcher"
    assert Path(lines[2]) == SCRIPTS / "launch/accelerate/ddp.yaml"
    assert lines[3:] == ["--num_processes", "3", "--main_process_port", "0", "-m", "uptrain", "run", "my model"]


def test_multi_cpu_without_a_number_of_processes(run_script):
    for wrong in ("", "0", "00", "x", "2x", "-1"):
        refusal = f"PROCESSES={wrong} is not a number of processes; give 2, for example."
        run_script("uptrain_multi_cpu.sh", "run", "MODEL", PROCESSES=wrong).refused(refusal)
    run_script("uptrain_multi_cpu.sh", "run", "MODEL").refused("PROCESSES= is not a number of processes")


def test_multi_cpu_starts_two_processes(tmp_path):
    """On this machine, as a user would."""
    import real_runs

    inputs, out = real_runs.make_inputs(tmp_path), tmp_path / "run"
    environment = {k: v for k, v in real_runs.environment().items() if k != "ACCELERATE_USE_CPU"}
    command = [SCRIPTS / "uptrain_multi_cpu.sh", *real_runs.arguments(inputs, out, steps=4)]
    result = subprocess.run(
        [str(x) for x in command], env={**environment, "PROCESSES": "2"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert real_runs.events(out, "started")[0]["processes"] == 2


@pytest.mark.parametrize("nohup", [False, True])
def test_the_launcher_passes_signals_on(monkeypatch, nohup):
    started = []

    def launch_command(options):
        arguments = get_args_parser().parse_args(["script.py"])  # torchrun's defaults are of the environment
        started.append((arguments.signals_to_handle, os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))

    monkeypatch.setattr(launcher, "launch_command", launch_command)
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    monkeypatch.setenv(MESSAGES, "")
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        assert launcher.main(["script.py"]) == 0
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert started == [(SIGNALS.replace("SIGHUP,", "") if nohup else SIGNALS, "600")]


def launch(script, by_torchrun=False):
    """Run a script in two processes by the project's launcher, or by torchrun."""
    options = ("--config_file", SCRIPTS / "launch/accelerate/ddp.yaml", "--num_processes", 2, "--main_process_port", 0)
    program = ["uptrain.distributed.launcher", *map(str, options)]
    if by_torchrun:
        program = ["torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command = [sys.executable, "-m", *program, script]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=SCRIPTS.parent)


@pytest.mark.parametrize(
    ("action", "code", "line"),
    [
        ("rank == 0 and sys.exit('Error: no such file.') or time.sleep(60)", 1, "Error: no such file."),
        ("sys.exit(2)", 2, ""),
        ("rank == 1 and os.kill(os.getpid(), 9) or time.sleep(60)", 1, "Error: process 1 was ended by SIGKILL; if "),
        ("rank == 0 and os.kill(os.getppid(), 15) or time.sleep(60)", 143, ""),
    ],
)
def test_the_launcher_ends_as_the_process_that_failed(tmp_path, action, code, line):
    """Without a traceback of its own, which would hide the line of the process."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{action}\n")
    result = launch(script)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert any(given.startswith(line) for given in result.stderr.splitlines()), result.stderr


def write_failing_script(folder, who):
    """Write the script of a command that refuses its input in some processes, and waits in the others."""
    script = folder / "script.py"
    script.write_text(
        "import os, time, click\nfrom model.common import console\nfrom model.common.errors import InputError\n"
        "@click.command()\ndef command():\n    rank = int(os.environ['RANK'])\n"
        f"    if {who}:\n        raise InputError('no room.')\n    time.sleep(60)\n"
        "console.run(command, launched=True)\n"
    )
    return script


@pytest.mark.parametrize(("who", "line"), [("rank == 1", "Error: process 1: no room."), ("True", "Error: no room.")])
def test_the_launcher_prints_an_error_that_only_another_process_has(tmp_path, who, line):
    """The first process prints those that all have."""
    result = launch(write_failing_script(tmp_path, who))
    assert result.returncode == 2
    assert [given for given in result.stderr.splitlines() if "room" in given] == [line], result.stderr


def test_torchrun_prints_an_error_that_only_another_process_has(tmp_path):
    """As in a job of Slurm, in its own table of failures."""
    result = launch(write_failing_script(tmp_path, "rank == 1"), by_torchrun=True)
    assert result.returncode == 1
    table = result.stderr.partition("FAILED")[2]
    assert re.search(r"rank +: 1\b", table) and "no room." in table, result.stderr


JOB = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "32",
}


@pytest.mark.parametrize(
    ("status", "ends", "code", "after"),
    [
        ("preempted", 0, 0, ["scontrol requeue 42"]), ("preempted", 1, 0, ["scontrol requeue 42"]),
        ("finished", 0, 0, []), ("failed", 1, 1, []), ("failed", 0, 1, []),
    ],
)  # fmt: skip
def test_slurm_requeues_what_stopped_in_order(shell, tmp_path, status, ends, code, after):
    run = tmp_path / "a run"
    run.mkdir()
    (run / "run_state.json").write_text('{"status": "preempted", "step": 2}')
    (run / "run.json").write_text("{}")
    writes = {"STATE": str(run / "run_state.json"), "WRITES": f'{{"status": "{status}", "step": 3}}'}
    result, lines = shell(
        "launch/slurm/uptrain.sbatch", run, "MODEL", "--alpha", "0.05", **JOB, **writes, CODE=str(ends)
    )
    assert result == code
    assert lines[:5] == ["srun true", "--cpus-per-task=32", "--kill-on-bad-exit=1", "bash", "-c"]
    assert lines[6:9] == ["torchrun", "--nnodes=2", "--nproc-per-node=8"]
    assert "--rdzv-endpoint=node7:29500" in lines
    assert lines[lines.index("-m") :] == ["-m", "uptrain", "resume", str(run), *after]


@pytest.mark.parametrize(("status", "saves", "after"), [
    ("failed", True, ["scontrol requeue 42"]), ("running", True, ["scontrol requeue 42"]), ("failed", False, []),
    ("halted", True, []),
])  # fmt: skip
def test_slurm_requeues_a_failure_after_a_checkpoint(shell, tmp_path, status, saves, after):
    """Without one, the next job would fail as this one did."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    later = f"$(mkdir {tmp_path}/checkpoints/step-00000004)" if saves else ""
    (tmp_path / "run_state.json").write_text(f'{{"status": "{status}", "step": 2}}')
    (tmp_path / "bin/srun").write_text(f'#!/bin/sh\necho "srun{later}"\nexit 1\n')
    code, lines = shell("launch/slurm/uptrain.sbatch", tmp_path, **JOB)
    assert (code, lines[1:]) == (0 if after else 1, after)


def test_torchrun_knows_the_options_of_the_job(shell, tmp_path):
    lines = shell("launch/slurm/uptrain.sbatch", tmp_path / "run", "MODEL", **JOB)[1]
    options = get_args_parser().parse_args(lines[lines.index("torchrun") + 1 :])
    assert set(options.signals_to_handle.split(",")) == set(SIGNALS.split(","))
    assert (options.shutdown_timeout, options.training_script) == (240, "uptrain")


@pytest.mark.parametrize(("torchrun", "code"), [
    ("exit 1", 1), ("kill -s TERM $PPID; exit 1", 0), ("kill -s USR1 $PPID; exit 1", 0), ("exit 0", 0),
])  # fmt: skip
def test_a_node_fails_only_by_itself(shell, tmp_path, torchrun, code):
    """Slurm ends the other nodes if one fails. One that stopped at a signal has not, though torchrun ends with 1."""
    run = tmp_path / "run"
    lines = shell("launch/slurm/uptrain.sbatch", run, "MODEL", "--alpha", "0.05", **JOB)[1]
    (tmp_path / "bin/torchrun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\n{torchrun}\n')
    (tmp_path / "bin/torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    result = subprocess.run(lines[3:], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()) == (code, lines[7:])


def test_slurm_does_not_requeue_a_job_that_did_nothing(shell, tmp_path):
    """What it finds may be the word of the job before."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "run_state.json").write_text('{"status": "preempted", "step": 2}')
    code, lines = shell("launch/slurm/uptrain.sbatch", tmp_path, **JOB)
    assert code == 1
    assert lines[-1] == str(tmp_path)


def test_slurm_starts_a_new_run(shell, tmp_path):
    code, lines = shell("launch/slurm/uptrain.sbatch", tmp_path / "run", "MODEL", "--alpha", "0.05", **JOB)
    assert code == 1
    start = lines.index("uptrain")
    assert lines[start:] == ["uptrain", "run", "MODEL", "--alpha", "0.05", "--out", str(tmp_path / "run")]
