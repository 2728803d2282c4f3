//! A frame as SVG. Braille, blocks and lines are drawn as shapes, so the picture does not depend on the viewer's fonts.

use super::{Rgb, colors};
use crate::ui::{ColorScheme, DOTS};
use ratatui::buffer::Buffer;
use ratatui::style::Modifier;
use std::fmt::Write;

/// Size of a cell.
const WIDTH: f64 = 8.0;
const HEIGHT: f64 = 16.0;

pub(super) fn svg(buffer: &Buffer, scheme: ColorScheme) -> String {
    let (width, height) = (f64::from(buffer.area.width) * WIDTH, f64::from(buffer.area.height) * HEIGHT);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"{}\"/>\n",
        hex(scheme.page().1)
    );
    for y in 0..buffer.area.height {
        let mut x = 0;
        while x < buffer.area.width {
            x += run_of_cells(buffer, x, y, scheme, &mut out);
        }
    }
    out + "</svg>\n"
}

/// Draws the run of equally styled cells from (x, y); returns its length.
fn run_of_cells(buffer: &Buffer, x: u16, y: u16, scheme: ColorScheme, out: &mut String) -> u16 {
    let first = &buffer[(x, y)];
    let (left, top) = (f64::from(x) * WIDTH, f64::from(y) * HEIGHT);
    let (ink, paper) = colors(first, scheme);
    let ink = hex(ink);
    if let Some(shape) = first.symbol().chars().next().and_then(|c| shape(c, left, top, &ink)) {
        out.push_str(&shape);
        return 1;
    }
    let mut text = String::new();
    let mut length = 0;
    while x + length < buffer.area.width {
        let cell = &buffer[(x + length, y)];
        let other = cell.style() != first.style();
        if other || cell.symbol().chars().next().is_some_and(|c| shape(c, 0.0, 0.0, "").is_some()) {
            break;
        }
        text.push_str(cell.symbol());
        length += 1;
    }
    let columns = f64::from(length) * WIDTH;
    if paper != scheme.page().1 {
        let _ = writeln!(
            out,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{columns}\" height=\"{HEIGHT}\" fill=\"{}\"/>",
            hex(paper)
        );
    }
    if !text.trim().is_empty() {
        let weight = if first.modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
        let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let baseline = top + HEIGHT * 0.75;
        let _ = writeln!(
            out,
            "<text x=\"{left}\" y=\"{baseline}\" fill=\"{ink}\"{weight} textLength=\"{columns}\" xml:space=\"preserve\">{escaped}</text>"
        );
    }
    length.max(1)
}

fn hex((r, g, b): Rgb) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// A braille, block or line character as a shape.
fn shape(c: char, x: f64, y: f64, ink: &str) -> Option<String> {
    let right = x + WIDTH;
    let bottom = y + HEIGHT;
    let middle = y + HEIGHT / 2.0;
    let center = x + WIDTH / 2.0;
    let lines = |path: String| Some(format!("<path d=\"{path}\" stroke=\"{ink}\" fill=\"none\"/>\n"));
    match c {
        '\u{2800}'..='\u{28ff}' => Some(braille(c as u32 & 0xff, x, y, ink)),
        '▁'..='█' => {
            let height = HEIGHT * f64::from(c as u32 - '▁' as u32 + 1) / 8.0;
            let top = bottom - height;
            Some(format!("<rect x=\"{x}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{height}\" fill=\"{ink}\"/>\n"))
        }
        '━' => Some(format!("<path d=\"M{x} {middle}H{right}\" stroke=\"{ink}\" stroke-width=\"4\"/>\n")),
        '─' => lines(format!("M{x} {middle}H{right}")),
        '│' => lines(format!("M{center} {y}V{bottom}")),
        '┊' => Some(format!("<path d=\"M{center} {y}V{bottom}\" stroke=\"{ink}\" stroke-dasharray=\"2 3\"/>\n")),
        '┌' => lines(format!("M{right} {middle}H{center}V{bottom}")),
        '┐' => lines(format!("M{x} {middle}H{center}V{bottom}")),
        '└' => lines(format!("M{right} {middle}H{center}V{y}")),
        '┘' => lines(format!("M{x} {middle}H{center}V{y}")),
        '├' => lines(format!("M{center} {y}V{bottom}M{center} {middle}H{right}")),
        '┤' => lines(format!("M{center} {y}V{bottom}M{center} {middle}H{x}")),
        '┴' => lines(format!("M{x} {middle}H{right}M{center} {middle}V{y}")),
        _ => None,
    }
}

fn braille(dots: u32, x: f64, y: f64, ink: &str) -> String {
    let mut out = String::new();
    for (row, bits) in DOTS.iter().enumerate() {
        for column in (0..2).filter(|&column| dots & u32::from(bits[column]) != 0) {
            let (cx, cy) = (x + 2.0 + column as f64 * 4.0, y + 2.0 + row as f64 * 4.0);
            let _ = writeln!(out, "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"1.3\" fill=\"{ink}\"/>");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::{Color, Style};

    #[test]
    fn a_selected_cell_swaps_its_colors() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 1, 1));
        buffer.set_string(0, 0, "a", Style::new().fg(Color::Rgb(1, 2, 3)).add_modifier(Modifier::REVERSED));
        let svg = svg(&buffer, ColorScheme::Light);
        assert!(svg.contains("fill=\"#010203\"/>") && svg.contains("fill=\"#ffffff\" textLength"), "{svg}");
    }
}
