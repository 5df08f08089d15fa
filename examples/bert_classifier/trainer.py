"""A text classifier with HF Trainer: what `yunlu init --from trainer.py` drafts job.yaml from."""

from datasets import load_dataset
from transformers import (
    BertForSequenceClassification,
    BertTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


tokenizer = BertTokenizer.from_pretrained("./bert")
model = BertForSequenceClassification.from_pretrained("./bert", num_labels=2)

dataset = load_dataset(
    "csv",
    data_files={"train": "train.txt", "validation": "validation.txt"},
    delimiter="\t",
    column_names=["label", "sentence"],
)
dataset = dataset.class_encode_column("label")


def tokenize(examples):
    return tokenizer(examples["sentence"], truncation=True, max_length=128)


dataset = dataset.map(tokenize, batched=True, remove_columns=["sentence"])

arguments = TrainingArguments(
    output_dir="./output",
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    warmup_steps=20,
    weight_decay=0.01,
    eval_strategy="epoch",
    logging_strategy="steps",
    logging_steps=500,
    save_strategy="epoch",
    seed=0,
    fp16=True,
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
print(trainer.evaluate())
