from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("bert")
model = AutoModelForSequenceClassification.from_pretrained("bert", num_labels=4)
files = {"train": "train.tsv", "validation": "validation.tsv"}
dataset = load_dataset("csv", data_files=files, delimiter="\t").class_encode_column("label")


def tokenize(examples):
    return tokenizer(examples["text"], truncation=True, max_length=64)


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


dataset = dataset.map(tokenize, batched=True, remove_columns=["text"])
arguments = TrainingArguments(
    output_dir="output",
    num_train_epochs=4,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    warmup_steps=40,
    weight_decay=0.01,
    eval_strategy="steps",
    eval_steps=25,
    save_strategy="epoch",
    seed=0,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=dataset["train"],
    eval_dataset=dataset["validation"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=accuracy,
)
trainer.train()
trainer.save_model("output/model")
