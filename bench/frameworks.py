"""The same training with Fabric, accelerate and Lightning, written as in their guides, in float32 and in bf16."""

import logging
import os
import time
import warnings

import torch
from torch import nn
from tutorials import Setting, Steps, endless, loader, optimizer

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def _where(setting: Setting) -> dict[str, object]:
    if setting.size > 1:
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "bench")  # or Lightning starts the other ranks itself
    strategy = "ddp" if setting.size > 1 else "auto"
    return {"accelerator": setting.device, "devices": setting.size, "strategy": strategy}


def fabric(setting: Setting, *, bf16: bool) -> Steps:
    from lightning.fabric import Fabric

    fabric = Fabric(**_where(setting), precision="bf16-mixed" if bf16 else "32-true")
    fabric.launch()
    model = setting.new_model()
    model, optim = fabric.setup(model, optimizer(model))
    batches = endless(fabric.setup_dataloaders(loader(setting), use_distributed_sampler=False))

    def steps(count: int) -> None:
        for _ in range(count):
            images, labels = next(batches)
            loss = nn.functional.cross_entropy(model(images), labels)
            optim.zero_grad()
            fabric.backward(loss)
            optim.step()

    return steps


def accelerate(setting: Setting, *, bf16: bool) -> Steps:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it holds one precision a process; autocast is settled when a model is prepared
    accelerator = Accelerator(
        cpu=setting.device == "cpu",
        mixed_precision="bf16" if bf16 else "no",
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
    )
    model = setting.new_model()
    # Its own sharding in place of the sampler: what its guide shows.
    own = Setting(**{**vars(setting), "rank": 0, "size": 1})
    model, optim, batches = accelerator.prepare(model, optimizer(model), loader(own))
    forever = endless(batches)

    def steps(count: int) -> None:
        for _ in range(count):
            images, labels = next(forever)
            loss = nn.functional.cross_entropy(model(images), labels)
            optim.zero_grad()
            accelerator.backward(loss)
            optim.step()

    return steps


class Paused:
    """A Lightning training. Lightning cannot run single steps, so the time that it takes to set up ``fit`` is
    subtracted.
    """

    def __init__(self) -> None:
        self.overhead_s = 0.0


def lightning(setting: Setting, *, bf16: bool) -> Steps:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.new_model()

        def training_step(self, batch, _index):
            images, labels = batch
            return nn.functional.cross_entropy(self.model(images), labels)

        def configure_optimizers(self):
            return optimizer(self.model)

    class Clock(pl.Callback):
        def on_fit_start(self, *_args) -> None:
            paused.overhead_s += time.process_time() - began[0]

        def on_train_batch_end(self, *_args) -> None:
            began[0] = time.process_time()

    module, batches, paused, began = Module(), loader(setting), Paused(), [0.0]

    def steps(count: int) -> None:
        began[0] = time.process_time()
        paused.overhead_s = 0.0
        trainer = pl.Trainer(
            **_where(setting),
            precision="bf16-mixed" if bf16 else "32-true",
            max_steps=count,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[Clock()],
        )
        trainer.fit(module, batches)
        paused.overhead_s += time.process_time() - began[0]  # after its last step

    steps.paused = paused  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    return steps
