"""fused_transducer.recipes.patch in the loops of transformers and PEFT: their own classes, Trainer and adapters."""

from __future__ import annotations

import inspect
from copy import deepcopy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")  # of Trainer

from fused_transducer import align, recipes  # noqa: E402

from fused_helpers import error  # noqa: E402

BLANK, PAD = 20, 2
ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
    **dict.fromkeys(("dropout", "activation_dropout", "attention_dropout", "layerdrop"), 0.0),
}  # fmt: skip
NEMOTRON = {
    "NemotronAsrStreamingForRNNT": "NemotronAsrStreamingConfig",
    "Nemotron3_5AsrForRNNT": "Nemotron3_5AsrConfig",
}
PARAKEET = {"ParakeetForTDT": "ParakeetTDTConfig", "ParakeetForRNNT": "ParakeetRNNTConfig"}


def model_of(kind, **sizes):
    """Return a small model of a class, the same at every call."""
    torch.manual_seed(0)
    sizes = {"decoder_hidden_size": 24, "num_decoder_layers": 1, "vocab_size": BLANK + 1, "pad_token_id": PAD, **sizes}
    config = getattr(transformers, {**PARAKEET, **NEMOTRON}[kind])
    return getattr(transformers, kind)(config(encoder_config=dict(ENCODER), blank_token_id=BLANK, **sizes))


def utterance(number):
    generator = torch.Generator().manual_seed(number)
    T, U = (int(torch.randint(*bounds, (), generator=generator)) for bounds in ((90, 160), (1, 6)))
    labels = torch.randint(3, BLANK, (U,), generator=generator)
    return {"input_features": torch.randn(T, 16, generator=generator), "labels": labels}


def collate(rows, padding=PAD):
    """Return what the processor makes of some utterances; padding: the pad id, which the model's own loss knows."""
    features, labels = ([row[name] for row in rows] for name in ("input_features", "labels"))
    frames = torch.tensor([len(x) for x in features])
    labels = torch.nn.utils.rnn.pad_sequence(labels, True, padding)
    return {
        "input_features": torch.nn.utils.rnn.pad_sequence(features, True),
        "attention_mask": torch.arange(max(frames)) < frames[:, None],
        "labels": labels,
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=BLANK),
    }


def trainer_of(model, folder, **options):
    """Return a Trainer of six steps with the defaults, but for what a test needs."""
    options = {
        "max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, **options,
    }  # fmt: skip
    padding = BLANK if type(model).__name__ == "ParakeetForRNNT" else PAD
    return transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(folder), **options),
        train_dataset=[utterance(number) for number in range(48)],
        eval_dataset=[utterance(number) for number in range(3)],
        data_collator=lambda rows: collate(rows, padding),
    )  # fmt: skip


def logged(trainer, name="loss"):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("kind", PARAKEET)
def test_the_best_path_of_a_model_is_that_of_its_joints_layers(kind):
    model, batch = model_of(kind).eval(), collate([utterance(number) for number in range(3)])
    labels, ids = batch.pop("labels"), batch.pop("decoder_input_ids")
    encoder_out, decoder_out = model.get_audio_features(**batch), model.decoder(ids)
    frames, scores, confidences = recipes.transformers.align(model, encoder_out, decoder_out, labels, confidence_span=0)
    lattice = {"topology": "tdt", "durations": model.config.durations} if kind == "ParakeetForTDT" else {}
    T, U = encoder_out.attention_mask.sum(1), (labels != PAD).sum(1)
    given = encoder_out.pooler_output, decoder_out, model.joint.head.weight, model.joint.head.bias, labels, T, U
    expected = align(*given, BLANK, "relu", **lattice, confidence_span=0)
    assert all(torch.equal(made, right) for made, right in zip((frames, scores, confidences), expected))
    assert (frames >= 0).sum(1).tolist() == U.tolist() and ((confidences > 0) == (frames >= 0)).all()


RUNS = {
    "plain": {}, "accumulation": {"gradient_accumulation_steps": 4}, "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", PARAKEET)
def test_six_steps_of_trainer_are_those_of_the_models_own_loss(kind, run, tmp_path):
    curves = []
    for change in (lambda model: None, recipes.patch):
        model = model_of(kind)
        model.accepts_loss_kwargs = False  # of the model's own class: the program in docs/defects says why
        change(model)
        trainer = trainer_of(model, tmp_path, **RUNS[run])
        trainer.train()
        curves.append((logged(trainer), logged(trainer, "grad_norm")))
    (own, own_norms), (fused, fused_norms) = curves
    assert len(fused) == 6 and fused == pytest.approx(own, rel=1e-3 if run == "bf16" else 1e-5)
    if run != "bf16":  # whose logits the own loss rounds
        assert fused_norms == pytest.approx(own_norms, rel=1e-4)


def test_trainer_resumes_and_saves_the_class_that_it_knows(tmp_path):
    whole = trainer_of(recipes.patch(model_of("ParakeetForTDT")), tmp_path / "whole")
    whole.train()
    model = model_of("ParakeetForTDT")
    half = trainer_of(recipes.patch(model), tmp_path / "half", save_strategy="steps", save_steps=3)
    half.train()
    again = trainer_of(recipes.patch(model_of("ParakeetForTDT")), tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
    assert logged(again)[-3:] == pytest.approx(logged(whole)[-3:], rel=1e-6)
    assert model.config.architectures == ["ParakeetForTDT"] and type(model) is transformers.ParakeetForTDT
    saved = transformers.AutoModelForTDT.from_pretrained(tmp_path / "half" / "checkpoint-6")
    assert type(saved) is type(model) and "forward" not in vars(saved)
    assert torch.equal(saved.joint.head.weight, model.joint.head.weight)


@pytest.mark.parametrize("kind", PARAKEET)
def test_evaluation_has_the_predictions_and_the_words_of_the_models_own(kind, tmp_path):
    results = []
    for change in (lambda model: model, recipes.patch):
        seen, model = [], change(model_of(kind))
        model.generation_config.update(
            decoder_start_token_id=BLANK, pad_token_id=PAD, suppress_tokens=[*range(BLANK + 1, BLANK + 6)]
        )
        trainer = trainer_of(model, tmp_path, per_device_eval_batch_size=3)
        batch = collate([*trainer.eval_dataset])
        features = {name: batch[name] for name in ("input_features", "attention_mask")}

        def metrics(made, seen=seen, model=model, features=features):
            seen.append(made.predictions)
            return {"error_rate": error_rate(model.generate(**features).sequences, made.label_ids)}

        trainer.compute_metrics = metrics
        evaluated = trainer.evaluate()
        results.append((evaluated["eval_loss"], seen[0], evaluated["eval_error_rate"]))
    (loss, predictions, errors), (fused, made, fused_errors) = results
    assert fused == pytest.approx(loss, rel=1e-6) and len(made) == len(predictions) == 3
    assert all(error(torch.from_numpy(x), torch.from_numpy(y)) < 1e-6 for x, y in zip(made, predictions))
    assert errors == fused_errors > 0


def error_rate(hypotheses, references):
    """Return the edit distance over the number of labels."""
    distance = count = 0
    for hypothesis, reference in zip(hypotheses.tolist(), references.tolist()):
        hypothesis, reference = ([x for x in ids if x not in (BLANK, PAD, -100)] for ids in (hypothesis, reference))
        row = list(range(len(reference) + 1))
        for i, word in enumerate(hypothesis, 1):
            before, row = row, [i]
            for j, right in enumerate(reference):
                row.append(min(before[j] + (word != right), before[j + 1] + 1, row[j] + 1))
        distance, count = distance + row[-1], count + len(reference)
    return distance / count


def loss_of(model, **inputs):
    """Return (output, gradients by name) of a batch, whose labels end as the class's own loss has it."""
    batch = collate([utterance(number) for number in range(4)], BLANK)
    batch["labels"] = torch.where(batch["labels"] == BLANK, inputs.pop("padding", PAD), batch["labels"])
    model.zero_grad()
    output = model(**batch, **inputs)
    output.loss.backward()
    return output, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_patching_keeps_the_signature_and_is_taken_back():
    model = model_of("ParakeetForTDT")
    output, gradients = loss_of(model)
    signature, parameters = inspect.signature(model.forward), set(model.state_dict())
    assert recipes.patch(model) is model and recipes.patch(model, reduction="sum") is model
    assert inspect.signature(model.forward) == signature and set(model.state_dict()) == parameters
    patched, _ = loss_of(model)
    assert type(patched) is type(output) and patched.logits is None and patched.loss > 2 * output.loss
    copy = deepcopy(model)
    with torch.no_grad():
        copy.joint.head.weight.zero_()
    assert loss_of(copy)[0].loss != patched.loss and loss_of(model)[0].loss == patched.loss
    assert loss_of(recipes.patch(model, logits=True))[0].logits.shape == output.logits.shape
    assert isinstance(model(**collate([utterance(0)]), return_dict=False), tuple)
    recipes.unpatch(recipes.unpatch(model))
    assert "forward" not in vars(model) and not hasattr(model, "accepts_loss_kwargs")
    own, again = loss_of(model)
    assert own.logits is not None and all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_what_is_no_transducer_and_what_was_replaced_are_refused():
    with pytest.raises(ValueError, match="Linear"):
        recipes.patch(torch.nn.Linear(2, 2))
    model = model_of("ParakeetForTDT")
    model.forward = model.forward  # as accelerate's hooks do
    with pytest.raises(ValueError, match="replaced"):
        recipes.patch(model)


@pytest.mark.parametrize("kind", NEMOTRON)
def test_models_without_a_loss_have_one(kind, tmp_path):
    torchaudio = pytest.importorskip("torchaudio")
    model = model_of(kind)
    with pytest.raises(TypeError, match="vocab_size"):
        loss_of(model)
    given = {"prompt_ids": torch.tensor([0, 1, 2, 3])} if kind == "Nemotron3_5AsrForRNNT" else {}
    batch = collate([utterance(number) for number in range(4)])
    output = model(**{**batch, "labels": None}, **given)
    frames = model.get_audio_features(batch["input_features"], batch["attention_mask"], **given).attention_mask.sum(1)
    U = (batch["labels"] != PAD).sum(1)
    losses = torchaudio.functional.rnnt_loss(
        output.logits[:, : max(frames)], batch["labels"].int(), frames.int(), U.int(), BLANK, reduction="sum"
    )
    expected = losses / U.sum()
    expected.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    made, made_gradients = loss_of(recipes.patch(model), **given)
    assert made.loss.item() == pytest.approx(expected.item(), rel=2e-6) and set(made_gradients) == set(gradients)
    largest = max(x.abs().max() for x in gradients.values())
    assert all((made_gradients[name] - x).abs().max() < 1e-5 * largest for name, x in gradients.items())
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    assert len(logged(trainer)) == 6 and logged(trainer)[5] < logged(trainer)[0]


HEADS = {
    "trained copy": {"target_modules": ["q_proj"], "modules_to_save": ["head"]},
    "copy of the joint": {"target_modules": ["q_proj"], "modules_to_save": ["joint"]},
    "low rank": {"target_modules": ["q_proj", "head"], "lora_bias": True},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_peft_is_the_one_that_is_active(head):
    peft = pytest.importorskip("peft")
    own = peft.get_peft_model(model_of("ParakeetForTDT"), peft.LoraConfig(r=4, lora_dropout=0.0, **HEADS[head]))
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    fused = peft.get_peft_model(recipes.patch(model_of("ParakeetForTDT")), own.peft_config["default"])
    fused.load_state_dict(own.state_dict())
    (expected, gradients), (made, made_gradients) = loss_of(own), loss_of(fused)
    assert made.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert set(gradients) == set(made_gradients) and any("head" in name for name in gradients)
    largest = max(x.abs().max() for x in gradients.values())
    assert all((made_gradients[name] - x).abs().max() < 1e-5 * largest for name, x in gradients.items())
    own.base_model.disable_adapter_layers()
    fused.base_model.disable_adapter_layers()
    with torch.no_grad():
        losses = [model(**collate([utterance(0), utterance(1)])).loss.item() for model in (own, fused)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_peft_computes_in_another_way_is_refused():
    peft = pytest.importorskip("peft")
    for options, word in (({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "Dora")):
        config = peft.LoraConfig(target_modules=["head"], **options)
        model = recipes.patch(peft.get_peft_model(model_of("ParakeetForTDT"), config)).train()
        with pytest.raises(ValueError, match=word):
            loss_of(model)


def test_a_low_rank_term_is_not_lost_in_16_bits():
    peft = pytest.importorskip("peft")
    model = model_of("ParakeetForTDT")
    own = peft.get_peft_model(deepcopy(model), peft.LoraConfig(target_modules=["head"], lora_dropout=0.0))
    head = own.base_model.model.joint.head
    with torch.no_grad():
        head.base_layer.weight.copy_(head.base_layer.weight.bfloat16())  # so that sums of bfloat16 would round it off
        head.lora_B["default"].weight.fill_(1e-4)
    fused = recipes.patch(deepcopy(own))
    with torch.autocast("cpu", torch.bfloat16):
        changed = fused(**collate([utterance(0)])).loss
        fused.base_model.disable_adapter_layers()
        before = fused(**collate([utterance(0)])).loss
    exact = recipes.patch(deepcopy(own))
    assert changed != before and changed.item() == pytest.approx(exact(**collate([utterance(0)])).loss.item(), rel=5e-3)
