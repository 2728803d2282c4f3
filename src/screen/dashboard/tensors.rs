//! The third tab: the table of tensors, the history of one of them, or the layers. The first tab has a short table.

use super::app::Tab;
use super::charts::{AxisUnit, Chart};
use super::keys::Action;
use super::layers;
use super::list::List;
use super::scene::Scene;
use crate::telemetry::{Bucket, RunState, TensorRow};
use crate::ui::{Canvas, Role, extent, format, power_range};
use ratatui::layout::Position;

/// Columns that a name gets before less telling columns are dropped: enough for GPT-2's longest name.
const NAME: usize = 24;
/// Columns of a name if there is room.
const LONG_NAME: usize = 40;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Sort {
    /// Share flushed to zero in the newest probe, then share of subnormals: worst first.
    #[default]
    Underflow,
    /// Parameter order.
    Order,
    Min,
    Max,
    Zero,
    Overflows,
}

const SORTS: [Sort; 6] = [Sort::Underflow, Sort::Order, Sort::Min, Sort::Max, Sort::Zero, Sort::Overflows];

/// Which tensors are listed, and in which order.
#[derive(Debug, Default)]
pub(super) struct Selection {
    sort: Sort,
    pub(super) list: List,
}

impl Selection {
    /// The rows, filtered and sorted.
    pub(super) fn rows<'a>(&self, run: &'a RunState) -> Vec<&'a TensorRow> {
        let mut rows: Vec<_> =
            run.tensors.rows.iter().filter(|row| row.name.contains(self.list.filter.as_str())).collect();
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        // Sorting is stable: equal rows stay in parameter order.
        let mut by = |key: &dyn Fn(&TensorRow) -> f64| rows.sort_by(|a, b| key(b).total_cmp(&key(a)));
        match self.sort {
            Sort::Order => {}
            Sort::Underflow => {
                by(&|row| share(row.stats.subnormal, row.stats.count));
                by(&|row| row.flushed.map_or(-1.0, |(flushed, nonzero)| share(flushed, nonzero)));
            }
            Sort::Min => by(&|row| -f64::from(row.stats.min_abs.unwrap_or(f32::INFINITY))),
            Sort::Max => by(&|row| f64::from(row.stats.max_abs)),
            Sort::Zero => by(&|row| share(row.stats.zero, row.stats.count)),
            Sort::Overflows => by(&|row| row.overflows as f64),
        }
        rows
    }

    fn title(&self, run: &RunState, at: &str) -> String {
        let order = match self.sort {
            Sort::Underflow if run.probe.is_some() => "worst underflow first",
            Sort::Underflow => "most subnormal first",
            Sort::Order => "in parameter order",
            Sort::Min => "smallest min|g| first",
            Sort::Max => "largest max|g| first",
            Sort::Zero => "most zeros first",
            Sort::Overflows => "most overflows first",
        };
        let probe = run.probe.as_ref().map(|probe| format!(" (probe at {})", probe.step)).unwrap_or_default();
        format!("Tensors, {order}{probe}{at}{}", self.list.label())
    }

    /// Why there are no rows.
    fn nothing(&self) -> &'static str {
        if self.list.filter.is_empty() { "no statistics of single tensors yet" } else { "no such tensor" }
    }
}

#[derive(Debug, Default)]
pub(super) struct TensorsTab {
    pub(super) layers: bool,
    /// The tensor whose history is open.
    pub(super) detail: Option<String>,
}

impl TensorsTab {
    /// Opens the tensor under the cursor.
    pub(super) fn open(&mut self, scene: &Scene) {
        if self.detail.is_none() {
            let rows = scene.tensors.rows(scene.run());
            self.detail = rows.get(scene.tensors.list.selected(rows.len())).map(|row| row.name.clone());
        }
    }
}

impl Tab for TensorsTab {
    fn draw(&self, scene: &Scene, canvas: &mut Canvas) {
        match &self.detail {
            _ if self.layers => layers::draw(scene, canvas),
            Some(name) => draw_history(scene, name, canvas),
            None => draw_table(scene, canvas),
        }
    }

    fn act(&mut self, scene: &mut Scene, action: Action, shown: bool) {
        match action {
            Action::Sort => {
                let at = scene.tensors.sort as usize;
                scene.tensors.sort = SORTS[(at + 1) % SORTS.len()];
            }
            Action::Layers => {
                self.layers = shown && !self.layers;
                self.detail = None;
            }
            Action::Details if shown && !self.layers => self.open(scene),
            _ => {}
        }
    }

    fn clicked(&mut self, scene: &mut Scene, (_, height): (u16, u16), at: Position) -> Option<usize> {
        let rows = scene.tensors.rows(scene.run()).len();
        let line = at.y.checked_sub(2).filter(|line| *line + 3 < height && self.detail.is_none() && !self.layers)?;
        let row = scene.tensors.list.hidden(rows, height.saturating_sub(3)) + usize::from(line);
        if row < rows && scene.tensors.list.click(row) {
            self.open(scene);
        }
        None
    }

    fn close(&mut self) -> bool {
        self.detail.take().is_some() || std::mem::take(&mut self.layers)
    }

    fn leave(&mut self) {
        self.detail = None;
    }

    fn list<'a>(&'a mut self, scene: &'a mut Scene) -> Option<(&'a mut List, usize)> {
        let rows = scene.tensors.rows(scene.run()).len();
        (self.detail.is_none() && !self.layers).then_some((&mut scene.tensors.list, rows))
    }
}

/// A column right of the names: its heading, its width, and the text and the role of a row's cell.
type TensorColumn = (&'static str, usize, fn(&Scene, &TensorRow) -> (String, Role));

/// The columns that leave room for the names in a table of this width, and the width of the names.
fn columns(scene: &Scene, width: usize) -> (Vec<TensorColumn>, usize) {
    let [min, max] = if scene.true_magnitudes { ["true min", "true max"] } else { ["min|g|", "max|g|"] };
    let all: [TensorColumn; 10] = [
        ("type", 4, |scene, row| text(format!("{:<4}", scene.run().computes_in(&row.name)))),
        ("2^-24", 7, |scene, row| text(touched(scene.run(), &row.name).unwrap_or_else(|| "-".into()))),
        ("elements", 9, |_, row| known(row, text(format::count(row.stats.count as f64)))),
        ("norm", 8, |scene, row| known(row, text(format::magnitude(Some(row.stats.norm as f32 / divisor(scene)))))),
        (min, 8, |scene, row| text(format::magnitude(row.stats.min_abs.map(|min| min / divisor(scene))))),
        (max, 8, |scene, row| known(row, text(format::magnitude(Some(row.stats.max_abs / divisor(scene)))))),
        ("zero", 7, |_, row| known(row, text(format::percent(row.stats.zero, row.stats.count)))),
        ("sub", 7, |_, row| known(row, share(row.stats.subnormal, row.stats.count))),
        ("under", 7, |_, row| match row.flushed {
            Some((flushed, nonzero)) => share(flushed, nonzero),
            None => ("-".into(), share(row.stats.subnormal, row.stats.count).1),
        }),
        ("✕", 4, |_, row| (row.overflows.to_string(), if row.overflows > 0 { Role::Overflow } else { Role::Text })),
    ];
    let mut columns = Vec::from(all);
    let less_telling = if scene.run().probe.is_some() { "sub" } else { "under" };
    let mut droppable = ["elements", "norm", "2^-24", "type", "zero", less_telling, min, max, "✕"].into_iter();
    loop {
        let name = width.saturating_sub(columns.iter().map(|(_, width, _)| width + 1).sum());
        match droppable.next().filter(|_| name < NAME) {
            Some(dropped) => columns.retain(|(heading, ..)| *heading != dropped),
            None => return (columns, name.min(LONG_NAME)),
        }
    }
}

fn text(text: String) -> (String, Role) {
    (text, Role::Text)
}

/// A cell of the newest table, which the rows that only a probe or an overflow has named are not in.
fn known(row: &TensorRow, cell: (String, Role)) -> (String, Role) {
    if row.stats.count == 0 { text("-".into()) } else { cell }
}

fn share(lost: u64, of: u64) -> (String, Role) {
    (format::percent(lost, of), if lost > 0 { Role::Subnormal } else { Role::Text })
}

/// The divisor of magnitudes: the loss scale of the newest table if true magnitudes are shown, else 1.
fn divisor(scene: &Scene) -> f32 {
    if scene.true_magnitudes { scene.run().tensors.loss_scale } else { 1.0 }
}

/// Draws the heading, or a tensor's row.
fn draw_row(scene: &Scene, canvas: &mut Canvas, y: u16, name: &str, columns: &[TensorColumn], row: Option<&TensorRow>) {
    let mut x = canvas.text(0, y, name, if row.is_some() { Role::Text } else { Role::Dim });
    for (at, (heading, width, cell)) in columns.iter().enumerate() {
        let (text, role) = row.map_or_else(|| ((*heading).to_owned(), Role::Dim), |row| cell(scene, row));
        let gap = if at + 1 < columns.len() { " " } else { "" };
        x = canvas.text(x, y, &format!("{text:>width$}{gap}"), role);
    }
}

/// Draws the panel of the first tab.
pub(super) fn draw_short(scene: &Scene, canvas: &mut Canvas) {
    let mut inner = canvas.frame(&[(&scene.tensors.title(scene.run(), ""), Role::Title)]);
    let rows = scene.tensors.rows(scene.run());
    if rows.is_empty() {
        inner.text(0, 0, scene.tensors.nothing(), Role::Dim);
        return;
    }
    let (columns, name) = columns(scene, inner.width().into());
    draw_row(scene, &mut inner, 0, &format!("{:<name$}", "tensor"), &columns, None);
    for (y, row) in (1..inner.height()).zip(rows) {
        let text = format!("{:<name$}", format::shortened_name(&row.name, name));
        draw_row(scene, &mut inner, y, &text, &columns, Some(row));
    }
}

fn draw_table(scene: &Scene, canvas: &mut Canvas) {
    let run = scene.run();
    let list = &scene.tensors.list;
    let at = if run.tensors.step == 0 { String::new() } else { format!(", at step {}", run.tensors.step) };
    let title = scene.tensors.title(run, &at);
    let mut inner = canvas.frame(&[(&title, Role::Title)]);
    let (columns, name) = columns(scene, usize::from(inner.width()).saturating_sub(2));
    draw_row(scene, &mut inner, 0, &format!("  {:<name$}", "tensor"), &columns, None);
    let rows = scene.tensors.rows(run);
    if rows.is_empty() {
        inner.text(2, 1, scene.tensors.nothing(), Role::Dim);
    }
    let hidden = list.hidden(rows.len(), inner.height().saturating_sub(1));
    for (y, (at, row)) in (1..inner.height()).zip(rows.iter().enumerate().skip(hidden)) {
        let text = format!("  {:<name$}", format::shortened_name(&row.name, name - 1));
        draw_row(scene, &mut inner, y, &text, &columns, Some(row));
        if at == list.selected(rows.len()) {
            inner.text(0, y, "▸", Role::Title);
            inner.highlight(y, Role::Selected);
        }
    }
}

/// The first step in which a tensor's gradient held 2^-24.
fn touched(run: &RunState, name: &str) -> Option<String> {
    run.tensors.underflow_onsets.get(name).map(u64::to_string)
}

/// Draws a tensor's smallest and largest magnitude over the run, with the format's limits, and the variance of its
/// layer's gradient where it was measured.
fn draw_history(scene: &Scene, name: &str, canvas: &mut Canvas) {
    let run = scene.run();
    let Some(row) = run.tensors.rows.iter().find(|row| row.name == *name) else { return };
    let format = run.grad_format();
    let (least, normal) = (format.min_subnormal_exponent(), format.min_exponent());
    let legend = format!("   min and max |g| as stored, log2   ┄ 2^{least} 2^{normal}");
    let mut inner = canvas.frame(&[(name, Role::Title), (&legend, Role::Dim)]);
    let first = touched(run, name).map(|step| format!(", first at 2^-24 in step {step}")).unwrap_or_default();
    inner.text(1, 0, &format!("computes in {}{first}", run.computes_in(name)), Role::Text);
    let width = inner.width();
    let rows = inner.height().saturating_sub(1);
    let variance = if layers::is_measured(run, name) { rows * 2 / 5 } else { 0 };
    layers::draw_history(scene, name, &mut inner.part(0, 1 + rows - variance, width, variance));
    let mut inner = inner.part(0, 1, width, rows - variance);
    let (low, high) = (&row.history.0, &row.history.1);
    let Some((bottom, top)) = extent(low.buckets().iter().chain(high.buckets()).flat_map(Bucket::ends)) else {
        inner.text(1, 0, "no history", Role::Dim);
        return;
    };
    // Draw a format's limits only if they are near the data: FP32's would compress everything else.
    let limits: Vec<_> = [least, normal].map(f64::from).into_iter().filter(|limit| bottom - limit < 24.0).collect();
    let bottom = limits.iter().fold(bottom, |bottom, limit| bottom.min(*limit));
    let chart = Chart::new(scene, power_range((bottom, top)), AxisUnit::Power);
    let first = scene.charts.first_step(run);
    chart.draw(&mut inner, |plot| {
        for limit in &limits {
            chart.limit(plot, *limit);
        }
        chart.history(plot, low, first, |bucket: &Bucket| bucket.min);
        chart.history(plot, high, first, |bucket: &Bucket| bucket.max);
    });
}
