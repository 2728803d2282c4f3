//! Measurements between steps: the validation loss, text samples, FP32 probes, the scale that would have worked, and
//! whether training gave a usable model.

use super::{LeaderMessage, Trainer, batches_in_step};
use crate::data::{Batch, counted};
use crate::precision::{Dtype, scale_text};
use crate::store::checkpoint::Best;
use crate::telemetry::{Activity, Event, PhaseProgress, SampleText, Validation};
use crate::train::engine::{EvalReport, StepReport};
use crate::train::objective::ObjectiveKind;
use crate::train::state::Counters;
use crate::train::{Bisection, bisect, headroom, probe};
use crate::{Error, Result};

impl Trainer {
    /// Measures the scale that the gradients need, after the last step of a run whose steps were all skipped.
    pub(super) fn measure_after_last(&mut self, report: &StepReport) -> Result<()> {
        let counters = self.engine.state.counters;
        if counters.updates == 0 && counters.step == self.total_steps && self.engine.state.scaler.config().enabled {
            let batches = batches_in_step(&self.micro_batches);
            let before = counters.before_skipped();
            let largest = headroom::largest_gradient(&mut self.engine, batches, before, report.scale)?;
            self.progress.working_scale = largest.map(|largest| self.engine.state.scaler.scale_for(largest));
        }
        Ok(())
    }

    /// Computes the validation loss and emits it; `None` without validation data.
    pub(super) fn validate(&mut self) -> Result<Option<Best>> {
        if self.eval.is_empty() {
            return Ok(None);
        }
        self.broadcast(&LeaderMessage::Evaluate)?;
        self.begin_phase("evaluating");
        let step = self.engine.state.counters.step;
        self.eval.rewind();
        let total = self.eval.remaining();
        let Self { eval, activity, engine, eval_batch, rollouts, .. } = self;
        // Prompts are read before the first completion.
        let counts = rollouts.is_none();
        let next = |batch: &mut Batch| {
            if counts {
                activity.advance("evaluating", PhaseProgress::Items(total - eval.remaining(), total));
            }
            eval.next_batch(batch)
        };
        let evaluation = match rollouts {
            Some(rollouts) => rollouts.evaluate(engine, eval_batch, next),
            None => engine.evaluate(eval_batch, next),
        }?;
        self.activity.end();
        self.eval.check()?;
        let EvalReport { loss, metrics: objective, targets: tokens } = evaluation;
        let perplexity = if objective.is_none() { loss.exp() } else { f64::NAN };
        let evaluation = Best { step, loss };
        self.progress.validation = Some(evaluation);
        self.emitter.emit(Event::Eval(Validation { step, loss, perplexity, tokens, objective }));
        Ok(Some(evaluation))
    }

    /// Returns an error if training had no effect, or gave a model that cannot be used.
    pub fn check_result(&self) -> Result<()> {
        self.check_applied()?;
        self.check_validation()
    }

    /// Returns an error if no step was applied, so that the exit code reports a run without effect.
    fn check_applied(&self) -> Result<()> {
        let Counters { step, updates, .. } = self.engine.state.counters;
        if updates > 0 || step == 0 {
            return Ok(());
        }
        let advice = match self.progress.last_loss {
            Some(loss) if !loss.is_finite() => self.advice_for_forward_overflows(),
            _ => match self.progress.working_scale {
                Some(scale) => {
                    format!("use a loss scale that fits the gradients: `--init-scale {}`", scale_text(scale))
                }
                None => "use a lower initial loss scale, or more steps".to_owned(),
            },
        };
        let steps = counted(step, "step");
        let message = format!("the model did not change, because its {steps} overflowed; {advice}");
        Err(Error::Diverged { step, message })
    }

    /// Returns an error if the trained model's validation loss is not finite.
    fn check_validation(&self) -> Result<()> {
        let Some(Best { step, loss }) = self.progress.validation else { return Ok(()) };
        // Without a reward, an objective has no loss.
        if loss.is_finite() || self.config.objective.kind != ObjectiveKind::Sft {
            return Ok(());
        }
        let message = format!("the validation loss is {loss}: {}", self.advice_for_trained_weights(""));
        Err(Error::Diverged { step, message })
    }

    /// Validates and saves a new best; `true` if early stopping is due.
    pub(super) fn evaluate(&mut self) -> Result<bool> {
        let Some(evaluation) = self.validate()? else { return Ok(false) };
        let improved = evaluation.loss.is_finite() && self.progress.best.is_none_or(|best| evaluation.loss < best.loss);
        if improved {
            self.progress.best = Some(evaluation);
            self.progress.early_stopping_counter = 0;
        } else if self.engine.state.counters.updates > 0 {
            self.progress.early_stopping_counter += 1;
        }
        if improved && self.config.checkpoint.keep_best {
            // A checkpoint of this step that already exists does not have the loss.
            self.progress.saved_at = None;
            self.schedule_save()?;
        }
        Ok(self.is_early_stopping_due())
    }

    pub(super) fn is_early_stopping_due(&self) -> bool {
        let patience = self.config.train.early_stopping;
        patience > 0 && self.progress.early_stopping_counter >= patience
    }

    pub(super) fn sample(&mut self) {
        let step = self.engine.state.counters.step;
        self.progress.sampled_at = Some(step);
        if self.sampler.is_some() {
            self.begin_phase("sampling");
        }
        let Some(sampler) = &mut self.sampler else { return };
        let (model, weights) = (&self.engine.model, &self.engine.state.weights);
        let text = sampler.generate(model, weights, self.config.seed ^ step);
        self.activity.end();
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                self.warn(format!("no text sample: {error}"));
                return;
            }
        };
        let prompt = self.config.train.prompt.clone();
        self.emitter.emit(Event::Sample(SampleText { step, prompt, text }));
    }

    /// Measures the cost of `dtype` in the next step, and searches the layers to keep in FP32 for a `tolerance`. The
    /// step remains the next one.
    pub fn bisect(&mut self, dtype: Dtype, tolerance: f64, activity: &Activity) -> Result<Bisection> {
        self.prepare_reference()?;
        let position = self.next_batches();
        self.loader.check()?;
        self.sample_completions(position)?;
        self.progress.retry = Some(position);
        let batches = batches_in_step(&self.micro_batches);
        if let Some(begin) = self.callbacks.begin {
            begin(&mut self.engine, batches)?;
        }
        bisect::bisect(&mut self.engine, batches, dtype, tolerance, activity)
    }

    /// Repeats the first micro-batch's backward pass in FP32. It only writes to buffers that the step overwrites, so
    /// the run's numbers do not change.
    pub(super) fn probe(&mut self) -> Result<()> {
        let masters = if self.is_distributed() { self.gathered().masters()? } else { None };
        if !self.engine.group.is_leader() {
            return Ok(());
        }
        let probe = probe::probe(&mut self.engine, &self.micro_batches[0], masters.as_ref())?;
        self.emitter.emit(Event::Fp32Probe(Box::new(probe)));
        Ok(())
    }
}
