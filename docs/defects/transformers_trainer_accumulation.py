# transformers 5.23.0, ParakeetForTDT: under Trainer 4 steps of accumulation add up 4 mean losses, divided by nothing.
import torch
from transformers import ParakeetForTDT, ParakeetTDTConfig, Trainer, TrainingArguments

encoder = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "dropout": 0.0}
encoder.update(activation_dropout=0.0, attention_dropout=0.0)
model = ParakeetForTDT(ParakeetTDTConfig(encoder_config=encoder, vocab_size=9, blank_token_id=8))
batch = {"input_features": torch.randn(1, 99, 80), "attention_mask": torch.ones(1, 99, dtype=torch.bool)}
batch.update(labels=torch.tensor([[5, 6]]), decoder_input_ids=torch.tensor([[8, 5, 6]]))
trainer = Trainer(model, TrainingArguments("trainer", gradient_accumulation_steps=4, use_cpu=True))
trainer.current_gradient_accumulation_steps = 4
loss = trainer.training_step(model, batch, trainer._get_num_items_in_batch([batch], "cpu"))
print("over", round((model(**batch).loss / loss).item()))  # prints over 1
