"""A user's script with every public function, for a type checker: no result is of type Any."""

from pathlib import Path
from typing import reveal_type

import malmoi


def watch(event: malmoi.Progress) -> None:
    print(event.verb, event.share)


lm = malmoi.load("runs/tiny-gpt")
reveal_type(lm.generate("a", max_new_tokens=4))
reveal_type(lm.generate(["a", "b"], temperature=0.0))
reveal_type(lm.stream("a"))
reveal_type(lm.score("a", " b"))
reveal_type(lm.score("a", [" b", " c"]))
reveal_type(lm.fill("a [MASK]"))
reveal_type(lm.embed(["a"]))
reveal_type(lm.embed(["a"], pool="none"))
reveal_type(lm.predict("a"))
reveal_type(lm.predict(["a", "b"]))
reveal_type(lm.predict("a", malmoi.Prediction).label)
reveal_type(lm.predict("a", list[malmoi.Span]))
reveal_type(lm.logits("a"))
reveal_type(malmoi.generate(lm, "a", max_new_tokens=4))
reveal_type(malmoi.generate("runs/tiny-gpt", ["a", "b"], seed=1))
reveal_type(malmoi.generate(lm, "a", n=3))
reveal_type(malmoi.stream(lm, "a"))
reveal_type(malmoi.chat(lm, "a"))
reveal_type(malmoi.chat(lm, [{"role": "user", "content": "a"}]))
reveal_type(malmoi.score(lm, "a", " b"))
reveal_type(malmoi.score(lm, ["a"], [" b"]))
reveal_type(malmoi.score(lm, "a", " b").to_dict())
reveal_type(malmoi.fill("runs/tiny-bert", "a [MASK]", top=3))
reveal_type(malmoi.fill("runs/tiny-bert", ["a [MASK]"]))
reveal_type(malmoi.embed(Path("runs/tiny-bert"), "a"))
reveal_type(malmoi.embed("runs/tiny-bert", ["a"], progress=watch))
reveal_type(malmoi.embed("runs/tiny-bert", ["a"], pool="none"))
reveal_type(malmoi.predict("runs/reviews", "a"))
reveal_type(malmoi.predict("runs/reviews", [("a", "b")], progress=watch))
reveal_type(malmoi.predict("runs/reviews", [("a", "b")], malmoi.Answer)[0].text)
reveal_type(malmoi.pretrain("gpt-char", data="book.txt", out="runs/a", minutes=3, progress=watch))
tuned = malmoi.finetune(lm, "sst2", "train.tsv", "runs/b", epochs=2, lr=2e-5, adapter="lora")
reveal_type(tuned)
reveal_type(tuned.metrics)
reveal_type(tuned.model)
reveal_type(malmoi.evaluate(tuned.model, "sst2", "dev.tsv"))
reveal_type(malmoi.evaluate(tuned.model, "sst2", "dev.tsv", per_label=True))
reveal_type(malmoi.evaluate(lm, "copa", "copa.jsonl", shots=4))
rows = [{"review": "good", "stars": 5}, {"review": "bad", "stars": 1}]
rated = malmoi.finetune(lm, data=rows, out="runs/h", text="review", label="stars", overwrite=True)
reveal_type(rated.model.predict(Path("new.csv")))
reveal_type(malmoi.evaluate(rated.model, data=rows))
reveal_type(malmoi.predict(rated.model, rows))
reveal_type(malmoi.recipes()["gpt2-small"].train.lr)
reveal_type(malmoi.tasks()["sst2"].kind)
reveal_type(malmoi.train_tokenizer(texts=["a b"], kind="char"))
asked: malmoi.PretrainOptions = {"minutes": 3.0, "overwrite": True}
reveal_type(malmoi.evaluate(lm, "copa", "copa.jsonl", shots=[0, 1, 4], limit=10))
reveal_type(malmoi.compress(lm, "runs/c", bits=4))
reveal_type(malmoi.compress("runs/a", "runs/d", "prune", heads=0.5))
reveal_type(malmoi.compress("runs/a", "runs/e", "distil", data="book.txt", minutes=3.0))
reveal_type(malmoi.compress("runs/a", "runs/f", "share", groups=1).metrics)
reveal_type(malmoi.export(lm, "model.onnx", dtype="int8"))
reveal_type(malmoi.plan("gpt2-small", gpus=8, price=2.5).cost)
reveal_type(malmoi.build_corpus("book.txt", "corpus", language="en").steps)
reveal_type(malmoi.study("in-context", data=["book.txt"], out="runs/g", seeds=1))
reveal_type(malmoi.custom_task("classification", text="a", label="b"))
reveal_type(malmoi.GenerationConfig(max_new_tokens=3))
reveal_type(malmoi.Tokenizer.load("runs/a"))
reveal_type(lm.tokenizer(["a"], padding=True, return_tensors="pt"))
reveal_type(lm.tokenizer("a"))
reveal_type(lm.hidden_states("a"))
reveal_type(lm.attention("a"))
reveal_type(malmoi.ModelConfig(vocab=10))
task: malmoi.Task = malmoi.custom_task("regression")
recipe: malmoi.Recipe | None = None
errors: tuple[type[malmoi.MalmoiError], type[malmoi.UsageError]] = (
    malmoi.MalmoiError,
    malmoi.UsageError,
)
malmoi.serve([lm, "runs/tiny-bert"], port=8000)
# mistakes that an editor shows
malmoi.pretrain("gpt-char", data="book.txt", out="runs/a", minuts=3)
malmoi.finetune(lm, "sst2", "train.tsv", "runs/b", epoch=2)
malmoi.generate(lm, "a", temprature=1.0)
malmoi.compress(lm, "runs/c", "prune", bits=4)
malmoi.generat(lm, "a")
