"""Trainings of tiny models in the Trainer."""

import torch
import transformers as hf

from optimum_moonshot import MoonshotConfig

CONFIG = MoonshotConfig(pattern="2:4", lam=0.9, num_samples=6, batch_size=2)
HALF = MoonshotConfig(sparsity=0.6, lam=0.9, num_samples=6, batch_size=2)


def samples(count=32, length=12):
    ids = torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder, model, *callbacks, data=None, cls=hf.Trainer, **changes):
    settings = dict(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, weight_decay=0.1,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    arguments = hf.TrainingArguments(**{**settings, **changes})
    return cls(model, arguments, train_dataset=data or samples(), callbacks=list(callbacks))
