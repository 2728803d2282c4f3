//! Regressions from daily use, one test for each numbered item: 7 (a resumed run), 14 (layouts), 15 (charts).

use super::*;
use crate::screen::picture::{ImageFormat, picture as picture_file};
use crate::telemetry::{FlushedTensor, Fp32Probe, SampleText};
use crate::ui::format;
use ratatui::crossterm::event::{MouseButton, MouseEvent, MouseEventKind};
use std::path::PathBuf;

/// A folder with a log of the first records of an invented run.
fn log(settings: Invented, records: usize) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut log = EventLog::open(&path).unwrap();
    InventedRun::new(settings).take(records).for_each(|record| log.append(&record).unwrap());
    (folder, path)
}

/// Regression: Ctrl-D detached, Ctrl-U added a `u` to a filter, and so did Esc with a key that followed at once, which
/// is Alt.
#[test]
fn a_key_with_control_or_alt_answers_nothing_and_types_nothing() {
    let mut view = running();
    let with = |view: &mut App, modifiers, c| view.key(KeyEvent::new(KeyCode::Char(c), modifiers));
    press(&mut view, "q");
    view.uptime += 300;
    for modifiers in [KeyModifiers::CONTROL, KeyModifiers::ALT] {
        assert_eq!(['s', 'd', 'D'].map(|c| with(&mut view, modifiers, c)), [None; 3]);
    }
    assert_eq!((view.dialog, view.exit), (Some(Dialog::Quit), None));
    press(&mut view, "\x1b4/mlp");
    with(&mut view, KeyModifiers::ALT, 'u');
    assert_eq!(view.list().unwrap().filter, "mlp");
    with(&mut view, KeyModifiers::CONTROL, 'u');
    assert_eq!(view.list().unwrap().filter, "");
}

fn click(view: &mut App, size: (u16, u16), column: u16, row: u16) {
    view.size = size;
    let kind = MouseEventKind::Down(MouseButton::Left);
    view.mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE });
}

/// The position of a text in a frame.
fn find(picture: &str, text: &str) -> (u16, u16) {
    let (row, line) = picture.lines().enumerate().find(|(_, line)| line.contains(text)).unwrap();
    (line.split(text).next().unwrap().chars().count() as u16, row as u16)
}

/// Regression: a narrow terminal cut the last digit of the time left.
#[test]
fn a_narrow_status_line_shows_the_whole_time_left() {
    let view = running();
    let time_left = |width| {
        let shown = picture(&view, (width, 15));
        shown.split_once("ETA ").unwrap().1.split_whitespace().next().unwrap().to_owned()
    };
    assert!((40..110).all(|width| time_left(width) == time_left(110)));
}

/// Regression: the note below the table was cut within a sentence, and the best scale at its end was not shown.
#[test]
fn the_note_on_loss_scales_fits() {
    let mut view = after(Invented::default(), 900);
    press(&mut view, "2");
    let (step, ..) = view.scene.run().grads.as_ref().unwrap();
    assert_shows(&view, COMPACT, &format!("of the gradients that FP16 kept at step {step} "));
}

/// Before the first probe, the table is of the gradients themselves: at the current scale, the shares of its row are
/// theirs.
#[test]
fn the_precision_tab_without_a_probe_is_of_the_stored_gradients() {
    let mut view = after(Invented::default(), 900);
    let (step, scale, stats) = view.scene.run().grads.clone().unwrap();
    let exponent = |value: f32| value.log2().floor() as i32;
    let scale = exponent(scale);
    let [min, max] = [stats.min_abs.unwrap(), stats.max_abs].map(exponent);
    let layers: Vec<_> = view.scene.run().layers().iter().filter_map(|layer| layer.min_abs).map(exponent).collect();
    assert!(scale > 0 && !layers.is_empty());
    for (key, shift, title) in [("2", 0, "(after loss scaling)"), ("u", scale, "(true magnitudes)")] {
        press(&mut view, key);
        let shown = picture(&view, FULL);
        assert!(shown.contains(title) && shown.contains("no FP32 probe yet: press p"), "{shown}");
        let line = shown.lines().find(|line| line.contains(&format!("step {step}, scale 2^{scale}: zero "))).unwrap();
        assert!(line.contains(&format!("  2^{} to 2^{} ", min - shift, max - shift)), "{line}");
        let row = shown.lines().find(|line| line.contains("▸ now")).unwrap();
        let nonzero = stats.exponents.iter().map(|(_, count)| count).sum::<u64>();
        let subnormal = format::share(stats.subnormal as f64 / nonzero as f64);
        assert!(row.contains(&format!("2^{scale} ")) && row.contains(&format!(" 0%{subnormal:>12} ")), "{row}");
    }
    press(&mut view, "1");
    let shown = picture(&view, FULL);
    assert!(layers.iter().all(|min| shown.contains(&format!(" 2^{} ", min - scale))), "{shown}");
}

#[test]
fn item_7_a_resumed_dashboard_shows_the_whole_run() {
    let (_folder, path) = log(Invented::default(), 1400);
    let before = RunState::history(&path).unwrap();
    let reached = before.step.step;
    let mut view = App::new(DashboardMode::Attached, before);
    assert!(picture(&view, FULL).starts_with("finetune ∙ waiting"));
    view.receive(started(Started { resumed_from: Some(1000), total_steps: 2000, ..Started::default() }));
    view.receive(step(StepRecord { step: 1001, loss: 3.5, ..StepRecord::default() }));
    let run = view.scene.run();
    assert!(reached > 1100);
    assert_eq!(run.curves.loss.whole().buckets().first().unwrap().step, 1);
    assert_eq!(run.curves.loss.at(1001).unwrap().last_step, 1001);
    assert!(run.overflows.iter().any(|row| row.step < 1000) && run.overflows.iter().all(|row| row.step <= 1000));
    let (best, at) = run.best_validation().unwrap();
    assert!(at <= 1000 && best.is_finite());
    assert_shows(&view, FULL, &format!("(best {best:.3} @ {at})"));
    let reason = telemetry::FinishReason::EarlyStopped;
    view.receive(record(Event::Finished(telemetry::Finished { reason, step: 1001, ..Default::default() })));
    assert_shows(&view, FULL, "ETA --:--:--");
}

#[test]
fn item_7_a_finished_run_that_is_resumed_shows_its_end() {
    let (_folder, path) = log(Invented { total_steps: 300, ..Invented::default() }, usize::MAX);
    let mut view = App::new(DashboardMode::Attached, RunState::history(&path).unwrap());
    view.receive(started(Started { resumed_from: Some(300), total_steps: 300, ..Started::default() }));
    let finished = telemetry::Finished { step: 300, loss: 3.214, ..Default::default() };
    view.receive(record(Event::Finished(finished)));
    let shown = picture(&view, FULL);
    assert!(shown.contains("step 300/300") && shown.contains("val loss    3.") && !shown.contains("NaN"), "{shown}");
    assert!(!shown.contains("step 0/"), "{shown}");
}

/// The first line of the log is damaged.
#[test]
fn a_run_of_unknown_length_has_no_total() {
    let mut view = running();
    view.scene.live.started = None;
    for size in [FULL, COMPACT, (50, 8), (30, 4)] {
        let shown = picture(&view, size);
        assert!(shown.contains("step 1779") && !shown.contains("1779/"), "{shown}");
    }
    let shown = picture(&view, FULL);
    assert!(shown.contains(" step 1779  epoch 2.67 ─") && !shown.contains("ETA"), "{shown}");
}

#[test]
fn item_14_one_column_below_78_and_charts_at_any_height() {
    let view = running();
    for (width, height) in [(60, 40), (100, 20), (60, 24), (40, 12), (200, 60)] {
        insta::assert_snapshot!(format!("overview_{width}x{height}"), picture(&view, (width, height)));
    }
    for width in 40..=130 {
        for height in 12..=50 {
            let shown = picture(&view, (width, height));
            assert!(shown.contains("Loss ") && shown.contains("Loss scale"), "{width}x{height}\n{shown}");
            assert!(shown.contains("scale 2^15") && shown.contains("step 17"), "{width}x{height}\n{shown}");
        }
    }
    for (width, height) in [(39, 5), (30, 4), (20, 3), (200, 2), (11, 3)] {
        let shown = picture(&view, (width, height));
        assert!(shown.contains("loss ") && shown.contains("scale 2^15"), "{width}x{height}\n{shown}");
    }
}

#[test]
fn a_tiny_terminal_shows_every_question() {
    let mut view = running();
    press(&mut view, "q");
    assert_shows(&view, (30, 4), "D discard");
    press(&mut view, "D");
    assert_eq!(picture(&view, (30, 4)).trim_end(), "y stop without saving\nEsc back");
}

#[test]
fn n3_something_moves_during_a_slow_step() {
    let mut view = running();
    let glyph = |view: &App| picture(view, (80, 24)).lines().next().unwrap().contains('▷');
    let last = view.scene.run().last_t;
    let mut seen = Vec::new();
    for later in (0..4000).step_by(100) {
        view.scene.now = last + later;
        seen.push(glyph(&view));
    }
    assert!(!seen[..4].contains(&true), "steps that are fast enough show that it runs");
    assert!(seen[4..].windows(5).all(|half| half.contains(&true) && half.contains(&false)), "{seen:?}");
}

#[test]
fn item_14_the_header_sheds_piece_by_piece() {
    let mut view = running();
    let header = |view: &App, width| picture(view, (width, 24)).lines().next().unwrap().to_owned();
    assert!(header(&view, 160).contains("distilgpt2 · p=f32 c=f16 · run 0007"));
    assert!(header(&view, 120).contains("c=f16 · run 0007") && header(&view, 120).contains("2 Precision"));
    assert!(header(&view, 105).contains("distilgpt2 · f16 · 0007") && header(&view, 105).contains("2 Precision"));
    assert!(header(&view, 80).contains("distilgpt2 · f16 · 0007") && !header(&view, 80).contains("2 Precision"));
    assert!(header(&view, 50).contains(" f16  "), "{}", header(&view, 50));
    for width in 40..200 {
        let header = header(&view, width);
        assert!(header.contains("▶ running") && header.contains("[1 Overview]"), "{header}");
    }
    // A run named after its model is shown without the model.
    let run = "distilgpt2-fp16-0001".to_owned();
    let (model, policy) = ("distilgpt2".into(), "p=f32,c=f16,g=f16,r=f32".into());
    view.receive(started(Started { run, model, policy, resumed_from: Some(1700), ..Started::default() }));
    assert!(header(&view, 120).contains("f16 · distilgpt2-fp16-0001"), "{}", header(&view, 120));
}

#[test]
fn item_15_a_cursor_reads_the_charts_at_a_step() {
    let mut view = running();
    press(&mut view, ",");
    assert_eq!(view.scene.charts.cursor, Some(view.scene.run().step.step));
    press(&mut view, "<<<,");
    let step = view.scene.charts.cursor.unwrap();
    assert!(step < 1600 && step > 1400, "{step}");
    insta::assert_snapshot!("cursor_120x36", changed_rows(&picture(&running(), FULL), &picture(&view, FULL)));
    key(&mut view, KeyCode::Esc);
    assert_eq!(view.scene.charts.cursor, None);
    // If every step has its own column, the cursor moves by one step.
    press(&mut view, "nnn,");
    let at = view.scene.charts.cursor.unwrap();
    press(&mut view, ",");
    assert_eq!(view.scene.charts.cursor, Some(at - 1));
    // Not every loss scale is a power of two.
    let next = StepRecord { step: 1780, loss_scale: 24576.0, ..view.scene.run().step.clone() };
    view.receive(super::step(next));
    press(&mut view, ">>>>>>");
    assert!(picture(&view, FULL).lines().last().unwrap().contains("scale 2.5e4"), "{}", picture(&view, FULL));
}

#[test]
fn item_15_the_last_steps_smoothing_and_the_chosen_curve() {
    let mut view = running();
    let last = view.scene.run().step.step;
    let axis = |view: &App| {
        let shown = picture(view, FULL);
        shown.lines().filter(|line| line.contains(&last.to_string())).map(str::to_owned).next().unwrap()
    };
    assert!(axis(&view).contains("│   0 "), "{}", axis(&view));
    for steps in [1000, 300, 100] {
        press(&mut view, "n");
        assert!(axis(&view).contains(&format!(" {} ", last - steps)), "{steps}: {}", axis(&view));
        assert_shows(&view, FULL, &format!("Loss last {steps}"));
    }
    insta::assert_snapshot!("last_100_120x36", changed_rows(&picture(&running(), FULL), &picture(&view, FULL)));
    press(&mut view, "n");
    assert_eq!(view.scene.charts.range, None);
    for window in ["smoothed 20", "smoothed 50", "smoothed 200", "batch   ◆ val", "smoothed 5 "] {
        assert!(picture(&view, FULL).contains(window), "{window}\n{}", picture(&view, FULL));
        press(&mut view, "w");
    }
    assert_shows(&view, FULL, "smoothed 20");
    for (chosen, title, figure) in [
        (None, "Loss scale (log2)", "2^15│"),
        (Some(0), "Learning rate", "e-5│"),
        (Some(1), "Gradient norm", "│"),
        (Some(2), "Tokens per second", "10.2k│"),
        (Some(3), "Resident memory", "1.3 GB│"),
        (Some(4), "Gradients, unscaled: first percentile", "│"),
        (Some(5), "Gradients that are zero", "%│"),
        (Some(6), "Gradients that are subnormal", "%│"),
        (Some(8), "Smallest gradient in FP32 probes", "│"),
        (Some(9), "Gradients flushed to zero, by probes", "%│"),
    ] {
        assert_eq!(view.scene.charts.second, chosen);
        let shown = picture(&view, FULL);
        assert!(shown.contains(title) && shown.contains(figure), "{title}\n{shown}");
        press(&mut view, "c");
    }
    press(&mut view, "c");
    insta::assert_snapshot!(
        "learning_rate_80x24",
        changed_rows(&picture(&running(), COMPACT), &picture(&view, COMPACT))
    );
}

#[test]
fn a_logarithmic_axis_ends_at_the_losses_that_it_can_show() {
    let mut view = App::new(DashboardMode::Attached, RunState::default());
    for (at, loss) in [(1, -1.0), (2, 0.0), (3, 0.01), (4, 0.1)] {
        view.receive(step(StepRecord { step: at, loss, ..StepRecord::default() }));
    }
    press(&mut view, "y");
    let shown = picture(&view, FULL);
    assert!(["log, positive only", "│0.107│", "│0.032│", "│0.009│"].iter().all(|part| shown.contains(part)), "{shown}");
}

/// Regression: the other figures were zeros.
#[test]
fn a_probe_before_the_first_table_shows_only_its_figures() {
    let mut view = App::new(DashboardMode::Attached, RunState::default());
    for at in 1..=5 {
        view.receive(step(StepRecord { step: at, loss: 1.0, ..StepRecord::default() }));
    }
    let tensors = vec![FlushedTensor { name: "wte.weight".into(), count: 8, nonzero: 4, flushed: 1 }];
    view.receive(record(Event::Fp32Probe(Box::new(Fp32Probe { step: 5, tensors, ..Fp32Probe::default() }))));
    press(&mut view, "3");
    let shown = picture(&view, FULL);
    let row = shown.lines().find(|line| line.contains("wte.weight")).unwrap();
    assert!(row.contains("25.0%") && !row.contains("0.0e0") && !shown.contains("at step 0"), "{shown}");
}

#[test]
fn labels_of_nearly_equal_losses_differ() {
    let mut view = App::new(DashboardMode::Attached, RunState::default());
    for at in 1..=1100 {
        view.receive(step(StepRecord { step: at, loss: 0.7931, ..StepRecord::default() }));
    }
    press(&mut view, "nnn");
    let shown = picture(&view, FULL);
    assert!(["│0.7936│", "│0.7931│", "│0.7926│"].iter().all(|label| shown.contains(label)), "{shown}");
}

#[test]
fn item_15_an_event_opens_with_all_that_is_known_of_it() {
    let mut view = running();
    press(&mut view, "4/overflow\n\n");
    insta::assert_snapshot!("event_detail_120x36", folded(&picture(&view, FULL)));
    key(&mut view, KeyCode::PageDown);
    assert_eq!(view.events.open.as_ref().unwrap().1.get(), 10, "a page, not a line");
    key(&mut view, KeyCode::Esc);
    assert!(view.events.open.is_none() && picture(&view, FULL).contains("[4 Events]"));
    // Wide characters take two columns.
    key(&mut view, KeyCode::Esc);
    let prompt = String::new();
    let text = "漢".repeat(100) + "字";
    view.receive(record(Event::Sample(SampleText { step: 1801, prompt, text })));
    key(&mut view, KeyCode::Enter);
    assert_shows(&view, FULL, "字");
}

#[test]
fn scrolling_ends_with_the_last_line() {
    for keys in ["4/overflow\n\n", "?"] {
        let mut view = running();
        press(&mut view, keys);
        let after = |view: &mut App, code, times| {
            for _ in 0..times {
                key(view, code);
                picture(view, (60, 12));
            }
            picture(view, (60, 12))
        };
        let first = picture(&view, (60, 12));
        let last = after(&mut view, KeyCode::Down, 50);
        assert_ne!(last, first);
        assert_ne!(after(&mut view, KeyCode::Up, 1), last, "{last}");
        assert_eq!(after(&mut view, KeyCode::Up, 50), first);
    }
}

#[test]
fn a_filter_is_typed_only_for_a_list_that_is_shown() {
    for keys in ["3v/q", "3\n/q", "4\n/q"] {
        let mut view = running();
        press(&mut view, keys);
        assert_eq!(view.dialog, Some(Dialog::Quit), "{keys:?}");
    }
}

#[test]
fn a_replay_that_starts_over_shows_its_first_rows() {
    let mut view = running();
    press(&mut view, "5jjj");
    assert!(view.list().unwrap().cursor > 0);
    view.receive(ScreenMessage::Rewind);
    let prompt = "again".into();
    let text = String::new();
    view.receive(record(Event::Sample(SampleText { step: 1, prompt, text })));
    assert_shows(&view, FULL, "again");
}

#[test]
fn item_15_themes_change_colors_and_nothing_else() {
    let mut view = running();
    let dark = buffer(&view, Theme::truecolor(ColorScheme::Dark), FULL);
    let mut next = || {
        press(&mut view, "t");
        buffer(&view, Theme::truecolor(ColorScheme::Dark), FULL)
    };
    let [light, contrast] = [next(), next()];
    assert_eq!([text_of(&light), text_of(&contrast)], [(); 2].map(|()| text_of(&dark)));
    assert_ne!(light, dark);
    assert!(contrast.content.iter().all(|cell| cell.bg == ratatui::style::Color::Rgb(0, 0, 0)));
    assert_eq!(next(), dark);
}

#[test]
fn item_15_the_mouse_chooses_a_tab_a_point_a_tensor_and_an_event() {
    for size in [FULL, COMPACT, (60, 40), (200, 60)] {
        let mut view = running();
        let (_, first) = find(&picture(&view, size), "Loss ");
        // The middle of the loss panel is about the middle of the run, its left edge the beginning.
        let panel = if size.0 < 78 { size.0 } else { size.0 / 2 };
        click(&mut view, size, panel / 2, first + 3);
        let middle = view.scene.charts.cursor.unwrap();
        assert!((700..1100).contains(&middle), "{size:?}: {middle}");
        click(&mut view, size, panel / 4, first + 3);
        assert!(view.scene.charts.cursor.unwrap() < middle);

        let (column, row) = find(&picture(&view, size), " 3 ");
        click(&mut view, size, column + 1, row);
        assert_eq!(view.tab, 2, "{size:?}");
        let name = tensors(&view)[4].name.clone();
        click(&mut view, size, 5, 7);
        assert_eq!((view.scene.tensors.list.cursor, &view.tensors.detail), (4, &None));
        click(&mut view, size, 5, 7);
        assert_eq!(view.tensors.detail, Some(name));

        let (column, row) = find(&picture(&view, size), " 4 ");
        click(&mut view, size, column + 1, row);
        let shown = picture(&view, size);
        let line = shown.lines().position(|line| line.contains("│") && line.contains("scale 2^14→2^15")).unwrap();
        click(&mut view, size, 5, line as u16);
        click(&mut view, size, 5, line as u16);
        assert!(view.events.open.is_some());
        assert_shows(&view, size, "scale 2^14→2^15");
    }
    // A click never sends a command.
    let mut view = running();
    press(&mut view, "q");
    click(&mut view, FULL, 60, 18);
    assert_eq!(view.dialog, Some(Dialog::Quit));
}

#[test]
fn item_15_a_replay_pauses_and_seeks() {
    let (_folder, path) = log(Invented { total_steps: 400, ..Invented::default() }, usize::MAX);
    let mut view = App::new(DashboardMode::Watching, RunState::default());
    view.scene.playback = Some(Playback { speed: 1.0, paused: true, seek: None, at: 0.0 });
    let mut source = LogSource::new(std::slice::from_ref(&path), Some(1.0));
    let mut scheme = |view: &mut App| {
        source.play(&mut view.scene.playback);
        while source.poll(Duration::ZERO, &mut |message| view.receive(message)).unwrap() {}
        source.play(&mut view.scene.playback);
    };
    scheme(&mut view);
    let at = |view: &App| view.scene.run().step.step;
    assert!(at(&view) <= 1, "{}", at(&view));
    for (key, expected) in [("]", 20), ("]", 40), ("]]]]]]", 60), ("[", 40), ("[", 20)] {
        press(&mut view, &key[..1]);
        scheme(&mut view);
        assert!(at(&view).abs_diff(expected) <= 2, "{key}: {} is not {expected}", at(&view));
        assert!(view.scene.run().curves.loss.whole().buckets().last().unwrap().last_step <= expected + 2);
    }
    assert_shows(&view, FULL, "‖ replay ×1");
    press(&mut view, " ++-");
    let playback = view.scene.playback.unwrap();
    assert_eq!((playback.paused, playback.speed), (false, 2.0));
    let footer = footer(&view, (250, 36));
    assert!(footer.contains("[ ]  seek") && footer.contains("space  pause"), "{footer}");
    assert!(!picture(&running(), (250, 36)).contains("[ ]  seek"));
    press(&mut view, "?");
    assert_shows(&view, FULL, "space  pause or continue the replay");
}

#[test]
fn item_15_runs_are_laid_over_one_another() {
    let mut view = running();
    view.scene.others = vec![RunState::default(), RunState::default()];
    for (at, seed) in [(0, 1200), (1, 600)] {
        for mut record in InventedRun::new(Invented { init_scale: 14 + at, ..Invented::default() }).take(seed) {
            if let Event::Started(started) = &mut record.event {
                started.run = format!("other-{at}\u{1b}[2J");
            }
            if let Event::Step(step) = &mut record.event {
                step.loss += 0.3;
            }
            view.receive(ScreenMessage::Other(at as usize, Box::new(record)));
        }
    }
    insta::assert_snapshot!("laid_over_120x36", changed_rows(&picture(&running(), FULL), &picture(&view, FULL)));
    press(&mut view, ",");
    assert!(picture(&view, FULL).lines().last().unwrap().contains("B 3."));
}

#[test]
fn item_15_pictures_are_files() {
    let (_folder, path) = log(Invented::default(), 1200);
    let logs = [path];
    for scheme in [ColorScheme::Dark, ColorScheme::Light, ColorScheme::HighContrast] {
        let svg = String::from_utf8(picture_file(&logs, "?x2u", (80, 24), scheme, ImageFormat::Svg).unwrap()).unwrap();
        assert!(svg.starts_with("<svg ") && svg.contains("viewBox=\"0 0 640 384\"") && svg.contains("[2 Precision]"));
        let png = picture_file(&logs, "", (80, 24), scheme, ImageFormat::Png).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (640, 384));
        let paper = <[u8; 3]>::from(scheme.page().1);
        let of_paper = pixels.chunks(3).filter(|pixel| *pixel == paper).count();
        assert!(of_paper > pixels.len() / 3 / 2 && of_paper < pixels.len() / 3, "{scheme:?}: {of_paper}");
    }
}

#[test]
fn the_precision_tab_shows_the_updates_that_reach_the_weights() {
    let mut view = running();
    let counts = UpdateCounts { elements: 1000, moved: 1000, lost: 969, distance: 1000 << 14 };
    let next = StepRecord { lost_updates: Some(counts), ..view.scene.run().step.clone() };
    let at = next.step;
    view.receive(step(next));
    press(&mut view, "2");
    let line =
        format!("3.1% of step {at}'s updates reach the FP16 weights; the masters keep the rest (0.250 ULP apart)");
    for size in [FULL, COMPACT] {
        assert_shows(&view, size, &line[..70]);
    }
}

#[test]
fn the_largest_scale_without_an_overflow_is_that_of_the_format() {
    let mut view = running();
    let highest = view.scene.run().probe_histogram().unwrap().highest().unwrap();
    press(&mut view, "2");
    assert_shows(&view, FULL, "● largest without overflow");
    view.scene.live.started.as_mut().unwrap().policy = "p=f32,c=bf16,g=bf16,r=f32".into();
    let best = (127 - highest).min(127);
    assert_shows(&view, FULL, &format!("largest without overflow 2^{best}, "));
}

/// Regression: the table counted finite gradients only.
#[test]
fn a_scale_that_overflowed_shows_so() {
    let mut view = running();
    let mut next = view.scene.run().step.clone();
    (next.loss_scale, next.grads.inf, next.grads.exponents) = (65536.0, 5, vec![(0, 95)]);
    view.receive(step(next));
    view.scene.live.probe = None;
    press(&mut view, "2");
    let shown = picture(&view, FULL);
    let row = |scale: &str| shown.lines().find(|line| line.contains(scale)).unwrap();
    assert!(row("▸ now").contains("2^16") && row("▸ now").contains(" 5.0%"), "{shown}");
    assert!(row("● largest").contains("2^15"), "{shown}");
}

#[test]
fn a_log_with_a_damaged_line_says_so() {
    let (_folder, path) = log(Invented::default(), 20);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "{\"v\":1, broken\n").unwrap();
    let mut view = App::new(DashboardMode::Watching, RunState::default());
    let mut source = LogSource::new(std::slice::from_ref(&path), None);
    source.poll(Duration::ZERO, &mut |message| view.receive(message)).unwrap();
    let mut listed = view.scene.run().events.iter().map(words::listed);
    assert!(listed.any(|text| text.contains("unreadable lines in the log: 1;")));
    assert_eq!(telemetry::read(&path).unwrap().len(), 20);
    // A damaged line without a neighbor keeps the run's clock.
    let (last_t, last_s) = (view.scene.run().last_t, view.scene.run().last_s);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "{broken\n").unwrap();
    source.poll(Duration::ZERO, &mut |message| view.receive(message)).unwrap();
    assert!(last_s > 0.0 && (view.scene.run().last_t, view.scene.run().last_s) == (last_t, last_s));
    assert_eq!(view.scene.run().events.back().unwrap().step, view.scene.run().step.step);
    // A replay warns too.
    let mut view = App::new(DashboardMode::Watching, RunState::default());
    let mut source = LogSource::new(std::slice::from_ref(&path), Some(1e12));
    while source.poll(Duration::ZERO, &mut |message| view.receive(message)).unwrap() {}
    let last = view.scene.run().events.back().unwrap();
    assert!(words::listed(last).contains("unreadable lines in the log: 2;"), "{last:?}");
    assert_eq!((last.s, last.step), (last_s, view.scene.run().step.step));
}
