"""transformers' Trainer with a tiny GPT-2 on the text of Python's own documentation."""

import hashlib
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

set_seed(0)
text = torch.tensor(list("".join(topics.values()).encode()[: 32 * 512]))
blocks = [{"input_ids": block, "labels": block} for block in text.view(-1, 32)]
sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
with tempfile.TemporaryDirectory() as output:
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=12,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=blocks)
    trainer.remove_callback(PrinterCallback)  # it prints how long everything took
    result = trainer.train()

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {result.training_loss:.6f} weights {hashlib.sha256(weights).hexdigest()}")
