#!/usr/bin/env python3
"""Compares Tessera's benchmark programs with a peer's, round by round on one machine.

A round runs the peer and then ours, for every mode, so that a slow minute of the machine meets both. Printed are the
medians over the rounds, their ratio (peer / ours: above 1, ours is better), and one line of JSON at the end. It pins
no process to a core; OMP_NUM_THREADS is the value of --threads after `--` (1 when absent).

  python3 benchmarks/compare.py --peer train_step.py --peer-python python3 --world 2 -- --dim 512 --layers 8
  python3 benchmarks/compare.py --host-overhead --peer host_overhead.py -- --world 512

The peer takes the flags of benchmarks/step/train_step (or benchmarks/engine/host_overhead) and prints its JSON line.
A mode `ours:theirs` names the same thing in both programs; `single` runs one process, whatever --world says.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEP = ROOT / "bazel-bin/benchmarks/step/train_step"
HOST = ROOT / "bazel-bin/benchmarks/engine/host_overhead"
POLL_SECONDS = 0.05


class RunError(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_env(rank, world, port, threads):
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
               MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return env


def end(children):
    """Ends what still runs: asks, then insists."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + 5
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_all(children, timeout):
    """Waits until all have ended; raises at the first failure, or when the time is over."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                raise RunError(f"rank {rank} ended with {code}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise RunError(f"ranks {waiting} still ran after {timeout} s (--timeout)")
        time.sleep(POLL_SECONDS)


def run(command, world, threads, timeout):
    """Runs `world` processes of the command; returns the last JSON object that rank 0 printed."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out_path = os.path.join(folder, "out")
        children, err_paths = [], []
        try:
            for rank in range(world):
                err_paths.append(os.path.join(folder, f"err{rank}"))
                with open(out_path if rank == 0 else os.devnull, "w") as out, open(err_paths[-1], "w") as err:
                    children.append(subprocess.Popen(command, env=rank_env(rank, world, port, threads),
                                                     stdin=subprocess.DEVNULL, stdout=out, stderr=err))
            wait_all(children, timeout)
        except RunError as error:
            end(children)
            text = "".join(pathlib.Path(path).read_text(errors="replace")[-2000:] for path in err_paths)
            raise RunError(f"{error}: {' '.join(command)}\n{text}") from None
        finally:
            end(children)
        for line in reversed(pathlib.Path(out_path).read_text().splitlines()):
            if line.startswith("{"):
                return json.loads(line)
    raise RunError(f"no line of JSON was printed by: {' '.join(command)}")


def median(results, field):
    return statistics.median(result[field] for result in results)


def losses_differ(ours, theirs, tolerance):
    """The largest difference of the losses of equal rounds, where it is above the tolerance; else None."""
    worst = 0.0
    for a, b in zip(ours, theirs):
        if len(a["loss_rank0"]) != len(b["loss_rank0"]):
            return float("inf")
        for x, y in zip(a["loss_rank0"], b["loss_rank0"]):
            difference = abs(x - y)
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst if worst > tolerance else None


def table(header, rows):
    lines = [header] + rows
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join(cells).rstrip())


def parse_modes(text):
    modes = []
    for pair in text.split(","):
        ours, colon, theirs = pair.partition(":")
        if not (ours and colon and theirs):
            raise RunError(f"--modes: expected ours:theirs, found {pair!r}")
        modes.append((ours, theirs))
    return modes


def compare_steps(args, peer, threads):
    modes = parse_modes(args.modes)
    ours = {mode: [] for mode in modes}
    theirs = {mode: [] for mode in modes}
    for round_index in range(args.rounds):
        for mode in modes:
            world = 1 if mode[0] == "single" else args.world
            theirs[mode].append(run(peer + ["--mode", mode[1]] + args.flags, world, threads, args.timeout))
            ours[mode].append(run([args.ours, "--mode", mode[0]] + args.flags, world, threads, args.timeout))
            print(f"round {round_index + 1}/{args.rounds} {mode[0]}: ours {ours[mode][-1]['median_s']:.4f} s, "
                  f"peer {theirs[mode][-1]['median_s']:.4f} s", file=sys.stderr, flush=True)
    rows, out, agree = [], {"rounds": args.rounds, "flags": args.flags, "modes": {}}, True
    for mode in modes:
        entry = {"ours": mode[0], "peer": mode[1], "world": ours[mode][0]["world"]}
        for field in ("median_s", "min_s", "peak_rss_mb"):
            entry["ours_" + field] = median(ours[mode], field)
            entry["peer_" + field] = median(theirs[mode], field)
            entry[field + "_ratio"] = entry["peer_" + field] / entry["ours_" + field]
        difference = losses_differ(ours[mode], theirs[mode], args.loss_tolerance)
        entry["losses_agree"] = difference is None
        out["modes"][mode[0]] = entry
        if difference is not None:
            agree = False
            print(f"LOSSES DIFFER in {mode[0]}: by {difference:g}, allowed {args.loss_tolerance:g}; "
                  f"ours {ours[mode][0]['loss_rank0']}, peer {theirs[mode][0]['loss_rank0']}", file=sys.stderr)
        rows.append([f"{mode[0]}:{mode[1]}", str(entry["world"]),
                     f"{entry['ours_median_s']:.4f}", f"{entry['peer_median_s']:.4f}",
                     f"{entry['median_s_ratio']:.3f}", f"{entry['ours_peak_rss_mb']:.0f}",
                     f"{entry['peer_peak_rss_mb']:.0f}", f"{entry['peak_rss_mb_ratio']:.2f}",
                     "agree" if difference is None else "DIFFER"])
    table(["mode", "world", "ours s", "peer s", "peer/ours", "ours MB", "peer MB", "peer/ours", "losses"], rows)
    print(json.dumps(out))
    return agree


def added_field(result):
    """The name of the one field that ends in _added_us: fsdp_added_us, fsdp2_added_us, ..."""
    fields = [name for name in result if name.endswith("_added_us")]
    if len(fields) != 1:
        raise RunError(f"expected one field *_added_us, found {sorted(result)}")
    return fields[0]


def compare_host_overhead(args, peer):
    ours, theirs = [], []
    for _ in range(args.rounds):
        theirs.append(run(peer + args.flags, 1, 1, args.timeout))
        ours.append(run([args.ours] + args.flags, 1, 1, args.timeout))
    prefixes = (added_field(ours[0])[:-len("_added_us")], added_field(theirs[0])[:-len("_added_us")])
    rows, out = [], {"rounds": args.rounds, "flags": args.flags}
    for ours_name, peer_name in [("plain_us", "plain_us"), ("plain_opt_us", "plain_opt_us")] + [
            tuple(prefix + end_of_name for prefix in prefixes) for end_of_name in ("_us", "_opt_us", "_added_us")]:
        a, b = median(ours, ours_name), median(theirs, peer_name)
        ratio = b / a if a > 0 else None  # a difference of two times may come out at or below 0
        out["ours_" + ours_name], out["peer_" + peer_name], out[ours_name + "_ratio"] = a, b, ratio
        rows.append([f"{ours_name}:{peer_name}", f"{a:.1f}", f"{b:.1f}", "-" if ratio is None else f"{ratio:.2f}"])
    table(["us per unit and step", "ours", "peer", "peer/ours"], rows)
    print(json.dumps(out))
    return True


def flag_value(flags, name, default):
    for i, flag in enumerate(flags):
        if flag == name and i + 1 < len(flags):
            return flags[i + 1]
        if flag.startswith(name + "="):
            return flag[len(name) + 1:]
    return default


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ours", help="our program (default: the one in bazel-bin)")
    p.add_argument("--peer", required=True, help="the peer's program, a Python file")
    p.add_argument("--peer-python", default=sys.executable, help="the Python that has the peer's framework")
    p.add_argument("--modes", default="ddp:ddp,fsdp:fsdp2,single:single", help="ours:theirs, ...")
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--timeout", type=float, default=600, help="seconds for one run of one program")
    p.add_argument("--loss-tolerance", type=float, default=1e-3)
    p.add_argument("--host-overhead", action="store_true", help="compare host_overhead instead")
    argv, flags = sys.argv[1:], []
    if "--" in argv:
        cut = argv.index("--")
        argv, flags = argv[:cut], argv[cut + 1:]
    args = p.parse_args(argv)
    args.flags = flags
    args.ours = os.path.abspath(args.ours or (HOST if args.host_overhead else STEP))
    if args.rounds < 1 or args.world < 1:
        p.error(f"expected --rounds and --world of at least 1, found {args.rounds} and {args.world}")
    if not os.access(args.ours, os.X_OK):
        p.error(f"no program at {args.ours}; build it: bazel build //benchmarks/...")
    peer = [args.peer_python, args.peer]
    try:
        if args.host_overhead:
            agree = compare_host_overhead(args, peer)
        else:
            agree = compare_steps(args, peer, flag_value(flags, "--threads", "1"))
    except (RunError, OSError) as error:
        sys.exit(f"compare.py: {error}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
