//! Tests of the whole dashboard: records and keys in, frames and commands out.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a failed unwrap is a failed test; figures are printed")]

mod daily_use;
#[path = "../../../examples/dashboard_demo/invented.rs"]
mod invented;

use super::dialogs::Dialog;
use super::{App, DashboardMode};
use crate::precision::UpdateCounts;
use crate::screen::renderer::{Exit, MessageSource, Playback, ScreenMessage};
use crate::screen::watch::LogSource;
use crate::screen::words;
use crate::telemetry::{
    self, CheckpointSaved, Command, Diagnostic, DtypeChange, Event, EventLog, FinishReason, FirstNonFinite, GpuStats,
    GradVariance, Overflow, Pass, ProcessRate, ProcessStats, Record, RunState, Started, StepRecord, TensorRow,
    Throughput, UnderflowOnset, VERSION,
};
use crate::ui::{ColorScheme, Palette, Theme, folded, text_of, to_ascii};
use invented::{Invented, InventedRun};
use ratatui::buffer::{Buffer, Cell};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use std::time::Duration;

const FULL: (u16, u16) = (120, 36);
const COMPACT: (u16, u16) = (80, 24);

/// The dashboard after the first `records` records of a run.
fn after(settings: Invented, records: usize) -> App {
    let mut view = App::new(DashboardMode::Attached, RunState::default());
    for record in InventedRun::new(settings).take(records) {
        view.scene.now = record.t + 41_000;
        view.receive(ScreenMessage::Record(Box::new(record)));
    }
    view
}

/// The dashboard in the middle of a run.
fn running() -> App {
    after(Invented::default(), 1800)
}

fn record(event: Event) -> ScreenMessage {
    ScreenMessage::Record(Box::new(Record { v: VERSION, t: 1_750_000_200_000, s: 200.0, event }))
}

fn started(started: Started) -> ScreenMessage {
    record(Event::Started(Box::new(started)))
}

fn step(step: StepRecord) -> ScreenMessage {
    record(Event::Step(Box::new(step)))
}

/// Presses a key; if a dialog is open, after it could be read.
fn key(view: &mut App, code: KeyCode) -> Option<Command> {
    view.uptime += if view.dialog.is_some() { 800 } else { 0 };
    view.key(KeyEvent::new(code, KeyModifiers::NONE))
}

/// Presses keys; a line break is Enter, `\x1b` is Esc.
fn press(view: &mut App, keys: &str) -> Vec<Command> {
    let code = |c| match c {
        '\n' => KeyCode::Enter,
        '\x1b' => KeyCode::Esc,
        c => KeyCode::Char(c),
    };
    keys.chars().filter_map(|c| key(view, code(c))).collect()
}

fn tensors(view: &App) -> Vec<&TensorRow> {
    view.scene.tensors.rows(view.scene.run())
}

fn ctrl_c(view: &mut App) -> Option<Command> {
    view.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL))
}

fn buffer(view: &App, theme: Theme, (width, height): (u16, u16)) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    view.draw(theme, &mut buffer);
    buffer
}

fn picture(view: &App, size: (u16, u16)) -> String {
    text_of(&buffer(view, Theme::truecolor(ColorScheme::Dark), size))
}

#[track_caller]
fn assert_shows(view: &App, size: (u16, u16), text: &str) {
    let shown = picture(view, size);
    assert!(shown.contains(text), "`{text}` is not in\n{shown}");
}

fn footer(view: &App, size: (u16, u16)) -> String {
    picture(view, size).lines().last().unwrap().to_owned()
}

/// Compares the frames at both sizes with the stored ones.
fn snapshots(name: &str, view: &App) {
    for (width, height) in [FULL, COMPACT] {
        insta::assert_snapshot!(format!("{name}_{width}x{height}"), folded(&picture(view, (width, height))));
    }
}

/// The rows of a frame that differ from the usual frame, with their numbers.
fn changed_rows(usual: &str, shown: &str) -> String {
    assert_eq!(usual.lines().count(), shown.lines().count());
    let rows = (1..).zip(shown.lines().zip(usual.lines())).filter(|(_, (shown, usual))| shown != usual);
    rows.map(|(row, (shown, _))| format!("{row:>2} {shown}")).collect::<Vec<_>>().join("\n")
}

/// Compares the rows that differ from the usual ones at both sizes with the stored rows.
fn changed_snapshots(name: &str, usual: &App, view: &App) {
    for (width, height) in [FULL, COMPACT] {
        let [usual, shown] = [usual, view].map(|view| picture(view, (width, height)));
        insta::assert_snapshot!(format!("{name}_{width}x{height}"), changed_rows(&usual, &shown));
    }
}

#[test]
fn every_tab() {
    let mut view = running();
    for (number, tab) in ["overview", "precision", "tensors", "events", "samples"].iter().enumerate() {
        press(&mut view, &(number + 1).to_string());
        snapshots(tab, &view);
    }
    press(&mut view, "3jj\n");
    snapshots("tensor_history", &view);
}

#[test]
fn every_state_of_a_run_and_every_dialog() {
    let view = App::new(DashboardMode::Attached, RunState::default());
    insta::assert_snapshot!("empty_80x24", folded(&picture(&view, COMPACT)));
    let empty = picture(&view, FULL);
    let panels = ["loss", "step", "gradients", "statistics of single tensors"].map(|what| format!("no {what} yet "));
    assert!(panels.iter().all(|text| empty.contains(text)) && empty.contains("│ none "), "{empty}");
    let broken = Invented { nan_from: 600, ..Invented::default() };
    changed_snapshots("nan", &after(Invented::default(), 700), &after(broken, 700));
    let mut view = after(Invented::default(), usize::MAX);
    assert_eq!((view.dialog, view.exit), (Some(Dialog::Summary), None));
    let mut closed = after(Invented::default(), usize::MAX);
    closed.dialog = None;
    changed_snapshots("finished", &closed, &view);
    let ended = picture(&closed, FULL);
    assert!(
        ended.starts_with("finetune ■ done  ") && ended.contains("  epoch 3.00/3  100.0%  ETA 00:00:00 ━"),
        "{ended}"
    );
    view = running();
    insta::assert_snapshot!("minimal_50x8", picture(&view, (50, 8)));
    insta::assert_snapshot!("too_small_30x4", picture(&view, (30, 4)));
    press(&mut view, "?");
    let [full, compact] = [FULL, COMPACT].map(|size| picture(&view, size));
    assert!(compact.lines().next().unwrap().contains("┌ Keys   j k scroll, any other key closes ─"), "{compact}");
    for row in compact.lines().skip(1).take(22) {
        let row: String = row.chars().skip(2).take(76).collect();
        assert!(full.contains(&row), "`{row}` is not in {full}");
    }
    insta::assert_snapshot!("help_120x36", full);
    view = running();
    press(&mut view, "q");
    changed_snapshots("quit", &running(), &view);
    insta::assert_snapshot!("quit_50x8", changed_rows(&picture(&running(), (50, 8)), &picture(&view, (50, 8))));
    view = running();
    view.receive(record(Event::Paused { step: 1790 }));
    changed_snapshots("paused", &running(), &view);
}

#[test]
fn a_scale_that_is_far_too_high_shows_who_overflowed_and_falls() {
    let view = after(Invented { init_scale: 24, total_steps: 60, ..Invented::default() }, 60);
    snapshots("overflow_storm", &view);
    let last = view.scene.run().overflows.back().unwrap();
    assert!(last.tensors.contains(&"ln_f.weight".to_owned()) && last.scale.to < 2f32.powi(18), "{last:?}");
}

/// The start of the log of a real run of `tiny` with `scaler.init_scale = 2^24`, with only one table of tensors.
#[test]
fn a_real_overflow_can_be_read_off() {
    let mut view = App::new(DashboardMode::Watching, RunState::default());
    for line in include_str!("fixtures/init_scale_2_24.jsonl").lines() {
        let record: Record = serde_json::from_str(line).unwrap();
        view.scene.now = record.t;
        view.receive(ScreenMessage::Record(Box::new(record)));
    }
    snapshots("real_overflows", &view);
    press(&mut view, "zzzz");
    let list = picture(&view, FULL);
    let rows = list.lines().filter(|line| line.starts_with("│✕")).count();
    assert_eq!(rows, view.scene.run().overflows.len());
    assert!(list.contains("1 2^24→2^23  ") && list.contains("8 2^17→2^16  h.0.attn.c_proj.bias, "), "{list}");
    let stairs: Vec<_> = view.scene.run().curves.scale.points().iter().map(|point| point.value).collect();
    assert!(stairs.len() > 6 && stairs.windows(2).all(|pair| pair[1] == pair[0] - 1.0), "{stairs:?}");
}

#[test]
fn layers_in_fallback_are_named_and_marked() {
    let mut view = running();
    let retyped = |step, layer: &str, overflows: Option<usize>| {
        let (from, to, restored) = if overflows.is_some() { ("f16", "f32", false) } else { ("f32", "f16", true) };
        let (layer, from, to) = (layer.into(), from.into(), to.into());
        record(Event::DtypeChange(DtypeChange { step, layer, from, to, overflows, restored, ..DtypeChange::default() }))
    };
    for (step, layer) in [(1801, "head"), (1802, "h.3"), (1803, "h.5")] {
        view.receive(retyped(step, layer, Some(3)));
    }
    view.receive(retyped(1900, "h.5", None));
    changed_snapshots("fallback", &running(), &view);
    press(&mut view, "4");
    assert_shows(&view, FULL, "▴ retyped layer=h.5 computes=f32->f16 back");
    // A process that resumes from an earlier step states its layers in fallback.
    let fallback = [("h.2".to_owned(), "f32".to_owned())].into();
    view.receive(started(Started { resumed_from: Some(1700), fallback, ..Started::default() }));
    assert_eq!(view.scene.run().in_fallback(), "f32 h.2");
}

/// The third tab shows each layer's dtype, the step at which a tensor first held 2^-24, and a layer's variance next to
/// the threshold at which a block enters FP8.
#[test]
fn layers_have_types_variances_and_the_threshold() {
    let mut view = running();
    let config = serde_json::json!({"precision": {"fp8": {"block": 3, "enter_variance": 6e-6, "exit_ratio": 2.0}}});
    view.receive(started(Started { resumed_from: Some(1779), config, ..Started::default() }));
    for step in 0..60 {
        let variance = |unit: usize| 2f64.powi(-14 - unit as i32) * (1.0 + (step % 7) as f64) / 4.0;
        let layers = (0..6).map(|unit| (format!("h.{unit}"), variance(unit))).collect();
        view.receive(record(Event::GradVariance(GradVariance { step: 1780 + step, layers })));
    }
    let (layer, from, to) = ("h.3".into(), "f16".into(), "fp8".into());
    view.receive(record(Event::DtypeChange(DtypeChange { step: 1840, layer, from, to, ..DtypeChange::default() })));
    let tensors = vec!["wte.weight".to_owned(), "h.3.mlp.c_fc.weight".to_owned()];
    view.receive(record(Event::UnderflowOnset(UnderflowOnset { step: 1840, tensors })));
    // Once said, it stays.
    let again = UnderflowOnset { step: 1841, tensors: vec!["wte.weight".to_owned()] };
    view.receive(record(Event::UnderflowOnset(again)));
    let overview = picture(&view, FULL);
    assert!(overview.contains("h.3   8 2^") && !overview.contains('▴'), "FP8 is no wider type: {overview}");
    press(&mut view, "3");
    let table = picture(&view, FULL);
    let row = table.lines().find(|line| line.contains("h.3.mlp.c_fc.weight")).unwrap();
    assert!(row.contains(" fp8     1840 "), "{row}");
    assert!(table.lines().any(|line| line.contains("wte.weight") && line.contains(" f16     1840 ")), "{table}");
    press(&mut view, "v");
    snapshots("layers", &view);
    press(&mut view, "v/h.3.mlp\n\n");
    snapshots("layer_variance", &view);
    press(&mut view, "\x1b4");
    assert_shows(&view, FULL, "▾ first at 2^-24, FP16's smallest: wte.weight, h.3.mlp.c_fc.weight");
    // A resume from before all this forgets it.
    view.receive(started(Started { resumed_from: Some(1700), ..Started::default() }));
    assert!(view.scene.run().tensors.underflow_onsets.is_empty());
    press(&mut view, "3v");
    insta::assert_snapshot!("layers_unmeasured_80x24", folded(&picture(&view, COMPACT)));
    assert_shows(&view, FULL, "no variance was recorded: enable it with `--set telemetry.grad_variance_every=20`");
}

#[test]
fn a_traced_overflow_names_pass_and_layer_in_list_and_events() {
    let mut view = running();
    for (step, pass, layer) in [(1801, Pass::Forward, "h.0.attn"), (1802, Pass::Backward, "h.3.mlp.c_fc")] {
        let origin = FirstNonFinite { pass, layer: layer.into(), tensor: "output".into(), ..FirstNonFinite::default() };
        let overflow = Overflow { step, first_nonfinite: Some(origin), ..Overflow::default() };
        view.receive(record(Event::Overflow(overflow)));
    }
    assert_shows(&view, FULL, "  ← h.3.mlp.c_fc");
    assert_shows(&view, FULL, "  → h.0.attn");
    press(&mut view, "4");
    assert_shows(&view, (200, 36), ", backward at h.3.mlp.c_fc (output): ");
}

#[test]
fn the_waits_of_processes_are_an_event() {
    let mut view = running();
    let rate = |name: &str, comm_fraction| ProcessRate { name: name.into(), tokens_per_s: 1500.0, comm_fraction };
    let processes = vec![rate("process 0", 0.25), rate("process 1", 0.5)];
    view.receive(record(Event::Throughput(Throughput { step: 1801, processes, stragglers: Vec::new() })));
    press(&mut view, "4");
    let each = "processes process 0: 1500 tokens/s, 25 % waiting; process 1: 1500 tokens/s, 50 % waiting";
    assert_shows(&view, (200, 36), each);
}

#[test]
fn a_frozen_view_does_not_change_while_the_run_continues() {
    let mut view = running();
    press(&mut view, "f");
    let frozen = picture(&view, FULL);
    for record in InventedRun::new(Invented::default()).skip(1800).take(100) {
        view.receive(ScreenMessage::Record(Box::new(record)));
    }
    assert_eq!(picture(&view, FULL), frozen);
    changed_snapshots("frozen", &running(), &view);
    press(&mut view, "f");
    assert_ne!(picture(&view, FULL), frozen);
}

#[test]
fn wide_formats_fold_their_ruler() {
    let picture_in = |policy: &str| {
        let mut view = App::new(DashboardMode::Attached, RunState::default());
        for mut record in InventedRun::new(Invented { init_scale: 0, ..Invented::default() }).take(200) {
            if let Event::Started(started) = &mut record.event {
                started.policy = policy.into();
                started.scaler.enabled = false;
            }
            view.receive(ScreenMessage::Record(Box::new(record)));
        }
        picture(&view, FULL)
    };
    let [bf16, fp32] = ["p=f32,c=bf16,g=bf16,r=f32", "p=f32,c=f32,g=f32,r=f32"].map(picture_in);
    insta::assert_snapshot!("overview_BF16", bf16);
    insta::assert_snapshot!("overview_FP32", changed_rows(&bf16, &fp32));
}

#[test]
fn every_size_draws() {
    let ended = after(Invented { total_steps: 80, init_scale: 20, ..Invented::default() }, 90);
    let mut views = [ended, running()];
    let dialogs = [None, None, Some(Dialog::Help), Some(Dialog::Quit), Some(Dialog::Summary)];
    let mut turn = 0;
    for width in 1..=250 {
        for height in 1..=80 {
            turn += 1;
            let view = &mut views[turn % 2];
            view.tab = turn % 5;
            view.dialog = dialogs[turn / 5 % 5];
            view.tensors.detail = (turn % 2 == 0).then(|| "wte.weight".into());
            view.overview.zoom = None;
            let drawn = buffer(view, Theme::truecolor(ColorScheme::Dark), (width, height));
            assert!(drawn.content.iter().any(|cell| cell.symbol() != " "), "{width}x{height} is empty");
        }
    }
}

#[test]
fn nothing_is_said_by_color_alone() {
    let mut view = running();
    let monochrome = Theme::of(Palette::Monochrome, false);
    for tab in 0..5 {
        view.tab = tab;
        for size in [FULL, COMPACT, (50, 8)] {
            let plain = buffer(&view, monochrome, size);
            assert_eq!(text_of(&plain), picture(&view, size));
            assert!(plain.content.iter().all(|cell| cell.fg == ratatui::style::Color::Reset), "tab {tab}");
        }
    }
}

#[test]
fn ascii_is_ascii() {
    let mut view = running();
    let theme = Theme::from_env(true, None);
    for (tab, detail) in (0..5).map(|tab| (tab, None)).chain([(2, Some("wte.weight".to_owned()))]) {
        view.tab = tab;
        view.tensors.detail = detail;
        let drawn = text_of(&buffer(&view, theme, FULL));
        assert!(drawn.is_ascii(), "{drawn}");
        // Blank braille is a blank, which ends a line here.
        let mapped: String = picture(&view, FULL).chars().map(to_ascii).collect();
        assert!(drawn.lines().eq(mapped.lines().map(str::trim_end)), "{drawn}");
        // Every glyph has an ASCII equivalent; the one `?` is the key.
        assert_eq!(drawn.matches('?').count(), 1, "{drawn}");
    }
}

/// A letter for the style of each cell, and a line for each letter. `overflow_storm_80x24` has the frame's text.
#[test]
fn the_colors_of_one_frame() {
    let view = after(Invented { init_scale: 24, total_steps: 60, ..Invented::default() }, 60);
    let frame = buffer(&view, Theme::truecolor(ColorScheme::Dark), COMPACT);
    let mut styles = Vec::new();
    let letter = |cell: &Cell| {
        let style = cell.style();
        let known = styles.iter().position(|known| *known == style);
        let at = known.unwrap_or_else(|| {
            styles.push(style);
            styles.len() - 1
        });
        char::from(b'a' + at as u8)
    };
    let letters: Vec<char> = frame.content.iter().map(letter).collect();
    let mut lines: Vec<String> = letters.chunks(COMPACT.0.into()).map(String::from_iter).collect();
    lines.extend(('a'..).zip(styles).map(|(letter, style)| format!("{letter} {style:?}")));
    insta::assert_snapshot!("styled_80x24", lines.join("\n"));
}

#[test]
fn keys_become_commands_and_answers_clear_their_notice() {
    let mut view = running();
    assert_eq!(press(&mut view, "segp"), [Command::SaveNow, Command::EvalNow, Command::SampleNow, Command::ProbeNow]);
    let failure = Diagnostic { step: 1, message: "no checkpoint".into() };
    let saved = Event::CheckpointSaved(CheckpointSaved::default());
    for (key, answer) in ["s", "s", "p"].iter().zip([saved, Event::Warning(failure), Event::Fp32Probe(Box::default())])
    {
        press(&mut view, key);
        assert_eq!(view.notice, Some(if *key == "p" { "probing in the next step" } else { "saving" }));
        view.receive(record(answer));
        assert_eq!(view.notice, None);
    }
    assert_eq!(press(&mut view, " "), [Command::Pause]);
    view.receive(record(Event::Paused { step: 1 }));
    assert_eq!(press(&mut view, " "), [Command::Resume]);
}

#[test]
fn a_watcher_sends_no_commands_and_quits_at_once() {
    let mut view = after(Invented::default(), 50);
    view.scene.mode = DashboardMode::Watching;
    let footer = |view: &App| footer(view, COMPACT);
    let usual = footer(&view);
    for command in [" ", "s", "e", "g", "p"] {
        assert_eq!(press(&mut view, command), []);
        assert!(footer(&view).contains("commands work only in the training terminal"), "{}", footer(&view));
        press(&mut view, "k");
        assert_eq!(footer(&view), usual, "the next key ends the message");
    }
    press(&mut view, "e");
    view.uptime += 6000;
    assert_eq!(footer(&view), usual, "time ends it too");
    press(&mut view, ",e");
    assert!(footer(&view).contains("commands work only"), "the cursor does not hide it");
    assert_eq!(press(&mut view, "q"), []);
    assert_eq!(view.exit, Some(Exit::Ended));
}

#[test]
fn a_watcher_is_offered_only_what_works() {
    let footer = |view: &App| footer(view, FULL);
    let mut watching = running();
    watching.scene.mode = DashboardMode::Watching;
    let offered = footer(&watching);
    assert!(offered.contains("f  freeze") && !offered.contains("pause") && !offered.contains("save"), "{offered}");
    press(&mut watching, "?");
    let help = picture(&watching, FULL);
    assert!(!["write a checkpoint", "replay:", "save and stop"].iter().any(|text| help.contains(text)), "{help}");
    assert!(help.contains("q      quit  "), "{help}");
    key(&mut watching, KeyCode::Esc);
    watching.scene.playback = Some(Playback { speed: 12.5, paused: false, seek: None, at: 0.0 });
    assert!(picture(&watching, FULL).starts_with("finetune ▶ replay ×12.5"));
    let finished = after(Invented::default(), usize::MAX);
    assert!(footer(&running()).contains("s  save") && !footer(&finished).contains("s  save"));
}

#[test]
fn a_gpu_has_its_figures_and_leaves_room_for_the_others() {
    let mut view = running();
    let gpu = GpuStats {
        utilization: Some(94.4),
        memory_bytes: 22_978_000_000,
        memory_total_bytes: 150_109_000_000,
        power_w: Some(610.8),
        temperature_c: Some(61.0),
    };
    let cost = |view: &App, size: (u16, u16)| {
        let picture = picture(view, size);
        picture.lines().nth(usize::from(size.1) - 2).unwrap().trim().to_owned()
    };
    let usual = StepRecord { tokens_per_s: 41_200.0, rss_bytes: Some(1 << 30), ..StepRecord::default() };
    let step_on = |gpu| step(StepRecord { step: 1780, gpu: Some(gpu), ..usual.clone() });
    view.receive(step_on(gpu));
    assert_eq!(
        cost(&view, FULL),
        "41.2k tok/s   0 ms/step   CPU 190%   GPU 94% 611 W 61 °C 23.0/150.1 GB   mem 1.1 GB   ckpt 1500, 69 s ago"
    );
    assert_eq!(cost(&view, COMPACT), "41.2k tok/s  0 ms/step  CPU 190%  GPU 94% 61°C 23.0/150.1 GB  mem 1.1 GB");
    // A MIG partition does not report all of them.
    let part = GpuStats { utilization: None, power_w: None, temperature_c: None, ..gpu };
    view.receive(step_on(part));
    assert!(cost(&view, FULL).contains("   GPU 23.0/150.1 GB   "));
}

#[test]
fn quitting_asks_and_follows_the_answer() {
    let mut view = running();
    assert_eq!(press(&mut view, "qd"), [Command::Detach]);
    assert_eq!(view.exit, Some(Exit::Detached));

    let mut view = running();
    assert_eq!(press(&mut view, "qk"), [], "`k` scrolls elsewhere");
    assert_eq!(press(&mut view, "D"), [], "discarding is asked about");
    assert_eq!(view.dialog, Some(Dialog::Discard));
    assert_eq!(press(&mut view, "y"), [Command::Stop { save: false }]);

    let mut view = running();
    press(&mut view, "q\x1b");
    assert_eq!((view.dialog, view.exit), (None, None));
    assert_eq!(press(&mut view, "qs"), [Command::Stop { save: true }]);
    assert_eq!(view.exit, None, "the screen stays until training has saved");
    let finished = InventedRun::new(Invented::default()).finished(FinishReason::Stopped);
    view.receive(record(finished));
    assert_eq!(view.exit, Some(Exit::Ended));
}

#[test]
fn control_c_saves_then_ends_everything() {
    let mut view = running();
    press(&mut view, "q");
    assert_eq!(ctrl_c(&mut view), Some(Command::Interrupt));
    assert_eq!((view.dialog, view.exit), (None, None));
    let footer = footer(&view, COMPACT);
    assert!(footer.starts_with(" saving, then stopping; Ctrl-C again stops without saving"), "{footer}");
    assert_eq!(ctrl_c(&mut view), None, "rapid presses do not abort");
    view.uptime += 2000;
    assert_eq!(ctrl_c(&mut view), Some(Command::Abort));
    assert_eq!(view.exit, Some(Exit::Killed));
}

#[test]
fn keys_typed_before_a_dialog_can_be_read_do_not_answer_it() {
    let mut view = running();
    let typed = |view: &mut App, c| view.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE));
    press(&mut view, "q");
    view.uptime += 299;
    assert_eq!([typed(&mut view, 's'), typed(&mut view, 'd')], [None, None]);
    assert_eq!((view.dialog, view.exit), (Some(Dialog::Quit), None));
    view.uptime += 1;
    assert_eq!(typed(&mut view, 'D'), None);
    assert_eq!(typed(&mut view, 'y'), None, "the next question is new");
    view.uptime += 300;
    assert_eq!(typed(&mut view, 'y'), Some(Command::Stop { save: false }));
    // A run may end while its user types.
    let mut view = after(Invented::default(), usize::MAX);
    typed(&mut view, 'q');
    assert_eq!((view.dialog, view.exit), (Some(Dialog::Summary), None));
}

#[test]
fn names_are_readable_at_60_columns_and_paths_are_short() {
    let mut view = running();
    view.scene.live.started.as_mut().unwrap().model = "/srv/models/distilgpt2/".into();
    assert!(picture(&view, FULL).contains(" distilgpt2 ·") && !picture(&view, FULL).contains("/srv"));
    press(&mut view, "3");
    insta::assert_snapshot!("tensors_60x20", picture(&view, (60, 20)));
    insta::assert_snapshot!("tensors_40x12", picture(&view, (40, 12)));
    let tensors = ["wte.weight", "h.0.attn.c_attn.weight", "ln_f.weight"].map(str::to_owned).to_vec();
    view.receive(record(Event::UnderflowOnset(UnderflowOnset { step: 1801, tensors })));
    press(&mut view, "4");
    for (size, shortened) in [(COMPACT, "wte.weight, h.0.a…n.weight│"), ((60, 20), "FP16's smallest: wt…ght│")]
    {
        assert_shows(&view, size, shortened);
    }
}

#[test]
fn a_signal_to_terminate_saves_and_closes_the_screen() {
    let mut view = running();
    assert_eq!(view.terminate(), Some(Command::Interrupt));
    assert_eq!(view.exit, Some(Exit::Terminated));
}

#[test]
fn training_that_ends_without_a_finished_event_is_lost() {
    let mut view = running();
    view.receive(ScreenMessage::Closed);
    assert_eq!(view.exit, Some(Exit::TrainerPanicked));

    let mut view = after(Invented::default(), usize::MAX);
    view.receive(ScreenMessage::Closed);
    assert_eq!(view.exit, None);
    press(&mut view, "q");
    assert_eq!(view.exit, Some(Exit::Ended));
}

#[test]
fn a_killed_process_shows_in_the_header_and_a_resumed_one_runs_again() {
    let mut view = running();
    view.receive(ScreenMessage::Gone);
    assert!(picture(&view, FULL).starts_with("finetune ✕ process gone"));
    view.receive(started(Started { resumed_from: Some(1000), ..Started::default() }));
    let now = view.scene.live.last_t;
    view.scene.now = now;
    assert!(picture(&view, FULL).starts_with("finetune ▶ running"));
}

#[test]
fn a_resumed_run_forgets_what_it_repeats_and_a_new_one_everything() {
    let mut view = running();
    let events = view.scene.run().overflows.len();
    assert!(events > 0);
    view.receive(started(Started { resumed_from: Some(100), ..Started::default() }));
    assert!(view.scene.run().curves.loss.whole().buckets().iter().all(|bucket| bucket.step <= 100));
    assert!(view.scene.run().overflows.iter().all(|row| row.step <= 100));
    view.receive(step(StepRecord { step: 101, loss: 9.0, ..StepRecord::default() }));
    assert_eq!(view.scene.run().curves.loss.whole().buckets().last().unwrap().max, 9.0);
    view.receive(started(Started::default()));
    assert!(view.scene.run().curves.loss.whole().is_empty());
}

#[test]
fn a_filter_is_typed_kept_and_dropped() {
    let mut view = running();
    press(&mut view, "3/mlpq");
    assert_eq!((view.scene.tensors.list.filter.as_str(), view.exit), ("mlpq", None), "keys are letters while typing");
    key(&mut view, KeyCode::Backspace);
    press(&mut view, "\n");
    assert!(tensors(&view).iter().all(|row| row.name.contains("mlp")) && tensors(&view).len() == 6);
    key(&mut view, KeyCode::Esc);
    assert_eq!(tensors(&view).len(), 16);
}

#[test]
fn sorting_goes_round_and_the_cursor_stays_within() {
    let mut view = running();
    press(&mut view, "3");
    let first = |view: &App| tensors(view)[0].name.clone();
    let by_underflow = first(&view);
    assert_eq!(by_underflow, "wte.weight");
    press(&mut view, "o");
    assert_eq!(first(&view), "h.0.attn.c_attn.weight");
    press(&mut view, "ooooo");
    assert_eq!(first(&view), by_underflow);
    press(&mut view, &"j".repeat(100));
    assert_eq!(view.scene.tensors.list.cursor, 15);
    press(&mut view, &"k".repeat(100));
    assert_eq!(view.scene.tensors.list.cursor, 0);
}

#[test]
fn zoom_goes_through_the_panels_and_back() {
    let mut view = running();
    let overview = picture(&view, FULL);
    for title in ["Loss ", "Loss scale", "Gradients", "Overflows", "Tensors"] {
        press(&mut view, "z");
        let picture = picture(&view, FULL);
        assert!(picture.lines().nth(1).unwrap().contains(title) && picture != overview, "{picture}");
    }
    press(&mut view, "z");
    assert_eq!(picture(&view, FULL), overview);
}

/// Processor time of this thread, so that other load on the machine does not count.
fn thread_time() -> Duration {
    let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(schedule.split_whitespace().next().unwrap().parse().unwrap())
}

#[test]
fn a_frame_is_drawn_in_milliseconds() {
    let view = after(Invented { total_steps: 6000, ..Invented::default() }, 5000);
    let began = thread_time();
    for _ in 0..20 {
        buffer(&view, Theme::truecolor(ColorScheme::Dark), (200, 60));
    }
    let each = thread_time().saturating_sub(began) / 20;
    println!("a frame of 200x60: {each:?}");
    // 5 ms in a release build; a test build is a few times slower.
    assert!(each < Duration::from_millis(if cfg!(debug_assertions) { 25 } else { 5 }), "{each:?}");
}

/// Writes a log of `steps` steps with the default intervals and opens it as `watch` does; returns time and memory.
fn open_long_log(steps: u64) -> (Duration, u64, App) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let template: Vec<Record> =
        InventedRun::new(Invented { tables_every: 16, ..Invented::default() }).take(1010).collect();
    let mut log = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    let mut step = 0;
    while step < steps {
        for mut record in template.iter().cloned() {
            match &mut record.event {
                Event::Step(record) => {
                    step += 1;
                    record.step = step;
                }
                Event::Started(_) if step > 0 => continue,
                _ => {}
            }
            serde_json::to_writer(&mut log, &record).unwrap();
            std::io::Write::write_all(&mut log, b"\n").unwrap();
        }
    }
    drop(log);
    let before = ProcessStats::now().rss_bytes.unwrap_or(0);
    let began = thread_time();
    let mut source = LogSource::new(std::slice::from_ref(&path), None);
    let mut view = App::new(DashboardMode::Watching, RunState::default());
    while source.poll(Duration::ZERO, &mut |message| view.receive(message)).unwrap() {}
    let took = thread_time().saturating_sub(began);
    (took, ProcessStats::now().rss_bytes.unwrap_or(0).saturating_sub(before), view)
}

#[test]
fn a_long_log_opens_fast() {
    let (took, _, view) = open_long_log(50_000);
    assert!(view.scene.run().step.step >= 50_000);
    // At 3 s a million these take 0.15 s in a release build; a test build is a few times slower.
    assert!(took < Duration::from_millis(if cfg!(debug_assertions) { 1500 } else { 150 }), "{took:?}");
}

#[test]
#[ignore = "writes two gigabytes; .ci/full runs it in a release build"]
fn a_log_of_a_million_steps_opens_in_three_seconds_and_thirty_megabytes() {
    let (took, memory, view) = open_long_log(1_000_000);
    assert!(view.scene.run().step.step >= 1_000_000);
    println!("a log of {} steps: {took:?}, {:.1} MiB", view.scene.run().step.step, memory as f64 / f64::from(1 << 20));
    assert!(took < Duration::from_secs(3) && memory < 30 << 20, "{took:?}, {memory} bytes");
}
