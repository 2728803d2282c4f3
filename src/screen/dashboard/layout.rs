//! The layout, a function of the terminal's size alone.

use ratatui::layout::Rect;

/// How much a terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    /// Everything: at least 110×34.
    Full,
    /// All panels except the table of tensors: at least 78×22.
    Compact,
    /// Loss and loss scale, and below them the panels that fit: at least 40×12.
    Small,
    /// Three status lines: at least 40×6.
    Minimal,
    /// Loss, scale and step as text, as far as they fit.
    Tiny,
}

impl Size {
    pub(crate) fn of(area: Rect) -> Self {
        match (area.width, area.height) {
            (110.., 34..) => Self::Full,
            (78.., 22..) => Self::Compact,
            (40.., 12..) => Self::Small,
            (40.., 6..) => Self::Minimal,
            _ => Self::Tiny,
        }
    }

    /// The size of a terminal whose tabs have this area.
    pub(super) fn around(body: Rect) -> Self {
        Self::of(Rect { height: body.height + HEADER + STATUS + FOOTER, ..body })
    }
}

/// Lines around the tabs.
const HEADER: u16 = 1;
const STATUS: u16 = 3;
const FOOTER: u16 = 1;

/// The areas of the screen, from top to bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Areas {
    pub(super) header: Rect,
    pub(super) body: Rect,
    pub(super) status: Rect,
    pub(super) footer: Rect,
}

impl Areas {
    pub(super) fn of(area: Rect) -> Self {
        let (header, rest) = split_top(area, HEADER);
        let (rest, footer) = split_bottom(rest, FOOTER);
        let (body, status) = split_bottom(rest, STATUS);
        Self { header, body, status, footer }
    }
}

/// Columns of the ruler's panel, including labels and frame; it never gets fewer.
const RULER_FULL: u16 = 63;
const RULER_COMPACT: u16 = 54;
/// The minimum width for two columns of panels.
const TWO_COLUMNS: u16 = 78;
/// The minimum height for two stacked charts.
const TWO_CHARTS: u16 = 11;

/// The panels of the first tab: loss, second chart, ruler, overflows and tensors. A panel that does not fit is empty.
pub(super) fn overview(body: Rect, size: Size) -> [Rect; 5] {
    let none = Rect::default();
    match size {
        Size::Full => {
            let (top, bottom) = split_top(body, (body.height * 11).div_ceil(31));
            let left = RULER_FULL.max(body.width / 2);
            let (loss, scale) = split_left(top, left);
            let (ruler, right) = split_left(bottom, left);
            let (overflows, tensors) = split_top(right, bottom.height * 2 / 5);
            [loss, scale, ruler, overflows, tensors]
        }
        Size::Compact => {
            let (top, bottom) = split_top(body, body.height / 2);
            let (loss, scale) = split_left(top, body.width / 2);
            let (ruler, overflows) = split_left(bottom, RULER_COMPACT);
            [loss, scale, ruler, overflows, none]
        }
        _ if body.width >= TWO_COLUMNS || body.height < TWO_CHARTS => {
            let list = if body.height >= TWO_CHARTS { body.height / 3 } else { 0 };
            let (top, overflows) = split_bottom(body, list);
            let (loss, scale) = split_left(top, body.width / 2);
            [loss, scale, none, overflows, none]
        }
        _ => {
            // The charts take the space that the others leave.
            let height = body.height;
            let ruler = if body.width >= RULER_COMPACT && height >= 26 { 9 + (height - 26) / 4 } else { 0 };
            let list = if height >= 16 { 4 + (height - 16) / 8 } else { 0 };
            let tensors = if body.width >= RULER_COMPACT && height >= 44 { 6 + (height - 44) / 4 } else { 0 };
            let (rest, tensors) = split_bottom(body, tensors);
            let (rest, overflows) = split_bottom(rest, list);
            let (rest, ruler) = split_bottom(rest, ruler);
            let (loss, scale) = split_top(rest, rest.height * 3 / 5);
            [loss, scale, ruler, overflows, tensors]
        }
    }
}

/// The ruler and the table of the second tab; only the table if the ruler does not fit.
pub(super) fn precision(body: Rect) -> (Rect, Rect) {
    if body.width < RULER_COMPACT {
        return (Rect { height: 0, ..body }, body);
    }
    split_top(body, (body.height * 3 / 5).max(body.height.saturating_sub(15)))
}

fn split_top(area: Rect, height: u16) -> (Rect, Rect) {
    let height = height.min(area.height);
    let rest = Rect { y: area.y + height, height: area.height - height, ..area };
    (Rect { height, ..area }, rest)
}

fn split_bottom(area: Rect, height: u16) -> (Rect, Rect) {
    split_top(area, area.height.saturating_sub(height))
}

fn split_left(area: Rect, width: u16) -> (Rect, Rect) {
    let width = width.min(area.width);
    let rest = Rect { x: area.x + width, width: area.width - width, ..area };
    (Rect { width, ..area }, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that the parts lie inside `area` and do not overlap, and, if `all`, that they cover it.
    fn check(area: Rect, parts: &[Rect], all: bool) {
        let mut covered = 0;
        for (at, part) in parts.iter().enumerate() {
            assert_eq!(part.intersection(area).area(), part.area(), "{part} is not within {area}");
            for other in &parts[at + 1..] {
                assert!(part.is_empty() || other.is_empty() || !part.intersects(*other), "{part} overlaps {other}");
            }
            covered += part.area();
        }
        assert!(!all || covered == area.area(), "{parts:?} leave a gap in {area}");
    }

    #[test]
    fn at_every_size_the_areas_are_inside_and_do_not_overlap() {
        for width in 1..=250 {
            for height in 1..=80 {
                let area = Rect::new(0, 0, width, height);
                let Areas { header, body, status, footer } = Areas::of(area);
                check(area, &[header, body, status, footer], true);
                for size in [Size::Full, Size::Compact, Size::Small] {
                    check(body, &overview(body, size), true);
                }
                let (ruler, table) = precision(body);
                check(body, &[ruler, table], true);
            }
        }
    }

    /// A framed chart needs five rows: one for the curve, two for its axis.
    #[test]
    fn from_40x12_on_loss_and_scale_are_drawn_and_the_ruler_gets_its_columns() {
        for width in 40..=250 {
            for height in 12..=80 {
                let area = Rect::new(0, 0, width, height);
                let body = Areas::of(area).body;
                assert_eq!(Size::around(body), Size::of(area));
                let overview = overview(body, Size::of(area));
                let [loss, scale, ruler, ..] = overview;
                assert!(
                    loss.height.min(scale.height) >= 5 && loss.width.min(scale.width) >= 20,
                    "{area}: {overview:?}"
                );
                let least = if Size::of(area) == Size::Full { RULER_FULL } else { RULER_COMPACT };
                let shown = matches!(Size::of(area), Size::Full | Size::Compact);
                assert!(!ruler.is_empty() || !shown, "{area}: {overview:?}");
                assert!(ruler.is_empty() || ruler.width >= least && ruler.height >= 8, "{area}: {overview:?}");
            }
        }
    }

    #[test]
    fn sizes_begin_where_the_design_says() {
        let of = |width, height| Size::of(Rect::new(0, 0, width, height));
        assert_eq!([of(110, 34), of(109, 34), of(110, 33)], [Size::Full, Size::Compact, Size::Compact]);
        assert_eq!([of(78, 22), of(77, 22), of(78, 21)], [Size::Compact, Size::Small, Size::Small]);
        assert_eq!([of(60, 40), of(100, 20), of(40, 12)], [Size::Small; 3]);
        assert_eq!(
            [of(40, 11), of(40, 6), of(39, 6), of(40, 5)],
            [Size::Minimal, Size::Minimal, Size::Tiny, Size::Tiny]
        );
    }
}
