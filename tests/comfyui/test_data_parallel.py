"""Two planes in a real ComfyUI with the tiny model: a batch and two sampler nodes are shared out over them.

Covered: results equal one plane's, one progress bar, nodes at the same time, the death of a rank. Not covered: order
and retry in all their cases (test_scheduler.py, test_planes.py).
"""

from __future__ import annotations

import os
import re
import signal

import graphs
import pytest
import torch
from comfy_kit import BackgroundRun, assert_counted, groups_of, latent_of, succeed
from graphs import node, sampled_latent

from devtools.comfy_server import ComfyServer

PLANES = {"mesh": "dp2", "devices": "cpu:2"}
ONE = {"mesh": "single", "devices": "cpu:1"}
SAMPLERS = ("uni_pc", "lcm")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(comfy: ComfyServer) -> ComfyServer:
    graphs.write_files(comfy.base)
    return comfy


def test_batch_of_three_on_two_planes_equals_one_plane(server: ComfyServer, seed: int) -> None:
    """lcm draws noise for the whole batch at each step, and the start image brings masks and clean latents."""
    latents = {}
    for place in (ONE, PLANES):
        for sampler in SAMPLERS:
            graph = sampled_latent(seed=seed, steps=3, batch_size=3, sampler=sampler, **place)
            result = succeed(server, graph)
            latents[place["mesh"], sampler] = latent_of(server, result)
            if place is PLANES:
                assert_counted(result, "sampler", 9)
    assert len(groups_of(server.pid)) == 2
    for sampler in SAMPLERS:
        one, planes = latents["single", sampler], latents["dp2", sampler]
        assert one.shape[0] == 3
        torch.testing.assert_close(planes, one, rtol=1e-4, atol=1e-4)
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert not torch.allclose(one[first], one[second], atol=0.1)


def test_two_sampler_nodes_run_at_the_same_time(server: ComfyServer, seed: int) -> None:
    graph = sampled_latent(seed=seed, steps=20, **PLANES)
    graph["second"] = node("WanDistSampler", **{**graph["sampler"]["inputs"], "seed": seed + 1})
    graph["save second"] = graphs.save_latent("second")
    seen = len(server.log)
    result = succeed(server, graph)
    spans = []
    for name in ("sampler", "second"):
        events = [e for e in result.of_kind("progress") if e.data["node"] == name]
        times = [e.at_s for e in events if e.data["max"] == 20]
        assert_counted(result, name, 20)
        spans.append((times[0], times[-1]))
    shared = min(end for _, end in spans) - max(begin for begin, _ in spans)
    print("spans", spans, "shared", shared)
    assert shared > 0.5 * min(end - begin for begin, end in spans)
    used = re.findall(r"SampleRequest on mesh single, plane (\d) of 2", server.log[seen:])
    assert sorted(used) == ["0", "1"]
    assert not torch.equal(latent_of(server, result), latent_of(server, result, "save second"))


def test_killed_plane_costs_a_retry_and_the_video_is_the_same(
    server: ComfyServer, seed: int
) -> None:
    options = {"steps": 40, "sampler": "euler", "batch_size": 2, **PLANES}
    succeed(server, sampled_latent(seed=seed + 1, **options))  # both planes are there
    graph = sampled_latent(seed=seed, **options)
    before = groups_of(server.pid)
    running = BackgroundRun(server, graph)
    running.wait_for_steps(4, maximum=80)
    os.kill(before[1].ranks[0], signal.SIGKILL)
    result = running.result()
    assert result.status == "success", result.error
    # The same planes, but a graph that is not answered from the cache.
    graph["model"]["inputs"]["devices"] = "cpu:3"
    again = succeed(server, graph)
    torch.testing.assert_close(
        latent_of(server, result), latent_of(server, again), rtol=1e-4, atol=1e-4
    )
    now = groups_of(server.pid)
    assert len(now) == 2
    assert before[0] in now
    assert before[1] not in now
