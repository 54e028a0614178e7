"""WanDistPlan: which mesh suits a video and given devices, before anything is bought or started."""

from __future__ import annotations

from math import isclose

from comfy_api.latest import io, ui

from ..comfyui.devices import cuda_devices
from ..comfyui.images import image_of
from ..jobs.handle import ModelHandle
from ..mesh.shape import TI2V_5B, video_grid
from ..mesh.workload import Workload
from ..model_file.header import read_model_file
from ..model_file.wan import read_wan_file
from ..planning.chart import draw_plan
from ..planning.hardware import DEVICES, known_pool, parse_pool
from ..planning.plan import make_plan
from ..planning.report import plan_text
from .inputs import CATEGORY, WanDistModel, cfg_input, size_inputs, validate_types

HERE = "here"


class PlanMesh(io.ComfyNode):
    """Starts no group and needs no GPU."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanDistPlan",
            display_name="Wan Dist Plan",
            category=CATEGORY,
            description="Compare the ways to cut a video over given GPUs: memory, data sent, and predicted seconds. "
            "Nothing is computed on them.",
            inputs=[
                *size_inputs("Of the video, in pixels."),
                io.Int.Input(
                    "length", default=121, min=1, max=16385, step=4, tooltip="Frames of the video."
                ),
                io.Int.Input(
                    "batch_size", default=1, min=1, max=4096, tooltip="Videos made in one job."
                ),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Denoising steps."),
                cfg_input(
                    "Guidance scale. At 1 only the prompt is computed, which halves the work."
                ),
                io.String.Input(
                    "devices",
                    default="8xH100-SXM",
                    tooltip="A number of devices such as 8xH100-SXM or 2x4090, or here for those of this machine. "
                    f"Known: {', '.join(device.name for device in DEVICES)}.",
                ),
                WanDistModel.Input(
                    "model",
                    optional=True,
                    tooltip="From Wan Dist Load Model, to plan for its file; without it TI2V-5B in bfloat16.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="chart", tooltip="Predicted seconds of each mesh."),
                io.String.Output(display_name="report", tooltip="The table, as text."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        steps: int,
        cfg: float,
        devices: str,
        model: ModelHandle | None = None,
    ) -> io.NodeOutput:
        validate_types(cls.execute, {name: type(value) for name, value in locals().items()})
        shape, dtype = TI2V_5B, "bfloat16"
        if model is not None:
            shape = read_wan_file(read_model_file(model.path)).shape
            dtype = dtype if model.dtype == "auto" else model.dtype
        is_here = devices.strip().lower() == HERE
        plan = make_plan(
            Workload(
                shape=shape,
                grid=video_grid(shape, height=height, width=width, frames=length),
                steps=steps,
                guided=not isclose(cfg, 1.0),
                batch=batch_size,
                dtype=dtype,
            ),
            known_pool(cuda_devices()) if is_here else parse_pool(devices),
        )
        chart = image_of(draw_plan(plan))
        report = plan_text(plan)
        shown = {**ui.PreviewImage(chart, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(chart, report, ui=shown)
