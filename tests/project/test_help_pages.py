"""Why README's troubleshooting asks for a plain name of the pack's folder. When this fails, aiohttp has mended it: let
the README say from which version on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

PAGES = Path(__file__).resolve().parents[2] / "web"


@pytest.mark.parametrize(
    ("folder", "status"), [("wan-dist_1.0", 200), ("wan dist", 404), ("wän-dist", 404)]
)
def test_pages_are_served_below_a_plain_name_only(folder: str, status: int) -> None:
    async def ask() -> int:
        app = web.Application()
        # As ComfyUI adds a pack's WEB_DIRECTORY.
        app.add_routes([web.static(f"/extensions/{folder}", PAGES)])
        async with TestClient(TestServer(app)) as client:
            answer = await client.get(f"/extensions/{folder}/docs/WanDistSampler.md")
            return answer.status

    assert asyncio.run(ask()) == status
