//! A frame as PNG, drawn with GNU Unifont, which covers the basic multilingual plane.

use super::colors;
use crate::ui::{ColorScheme, DOTS, format};
use crate::{Error, Result};
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::Modifier;

/// Pixels of a cell, the size of a half-width glyph.
const WIDTH: usize = 8;
const HEIGHT: usize = 16;

pub(super) fn png(buffer: &Buffer, scheme: ColorScheme) -> Result<Vec<u8>> {
    let (columns, rows) = (usize::from(buffer.area.width), usize::from(buffer.area.height));
    let mut canvas = PixelBuffer { width: columns * WIDTH, pixels: vec![0; columns * WIDTH * rows * HEIGHT * 3] };
    for y in 0..rows {
        let mut x = 0;
        while x < columns {
            let cell = &buffer[(x as u16, y as u16)];
            let cells = format::columns(cell.symbol()).clamp(1, 2);
            canvas.draw((x, y), cells.min(columns - x), cell, scheme);
            x += cells;
        }
    }
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, canvas.width as u32, (rows * HEIGHT) as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&canvas.pixels));
    written.map_err(|error| Error::config("picture", error.to_string()))?;
    Ok(bytes)
}

struct PixelBuffer {
    width: usize,
    pixels: Vec<u8>,
}

impl PixelBuffer {
    /// Draws a cell's character over `cells` cells.
    fn draw(&mut self, (x, y): (usize, usize), cells: usize, cell: &Cell, scheme: ColorScheme) {
        let (ink, paper) = colors(cell, scheme);
        let bold = cell.modifier.contains(Modifier::BOLD);
        let c = cell.symbol().chars().next().unwrap_or(' ');
        let glyph = unifont::get_glyph(c);
        let width = cells * WIDTH;
        // Compress a glyph that is too wide, and leave its last column empty: it would touch its neighbor.
        let (drawn, taken) = match glyph.map_or(width, unifont::Glyph::get_width) {
            wide if wide > width => (wide, width - 1),
            fitting => (fitting, fitting),
        };
        // Unifont also marks the unset dots of braille characters, so draw the set ones here.
        let dots = matches!(c, '\u{2800}'..='\u{28ff}').then_some(c as u32 & 0xff);
        for row in 0..HEIGHT {
            let lit = |column: usize| {
                if let Some(dots) = dots {
                    // Each dot is 2×2 pixels.
                    let set = dots & u32::from(DOTS[row / 4][column / 4]) != 0;
                    return set && (1..3).contains(&(row % 4)) && (1..3).contains(&(column % 4));
                }
                let part = column * drawn / taken..(column + 1) * drawn / taken;
                column < taken && glyph.is_some_and(|glyph| part.clone().any(|column| glyph.get_pixel(column, row)))
            };
            for column in 0..width {
                let on = lit(column) || bold && column > 0 && lit(column - 1);
                let (r, g, b) = if on { ink } else { paper };
                let at = ((y * HEIGHT + row) * self.width + x * WIDTH + column) * 3;
                self.pixels[at..at + 3].copy_from_slice(&[r, g, b]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    /// Unifont's sign for a line feed is two cells wide, and has one.
    #[test]
    fn a_compressed_glyph_does_not_touch_its_neighbor() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 3, 1));
        buffer.set_string(0, 0, "a⏎b", Style::new());
        let bytes = png(&buffer, ColorScheme::Dark).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let (r, g, b) = ColorScheme::Dark.page().1;
        let inked = |column: usize| {
            (0..HEIGHT).filter(|row| pixels[(row * 3 * WIDTH + column) * 3..][..3] != [r, g, b]).count()
        };
        assert!((WIDTH..2 * WIDTH - 1).any(|column| inked(column) > 2), "the sign is drawn");
        assert_eq!(inked(2 * WIDTH - 1), 0);
    }
}
