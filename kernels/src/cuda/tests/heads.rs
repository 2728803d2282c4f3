//! Rotations and grouped heads.

use super::super::heads;
use super::super::launch::Rows;
use super::*;
use crate::attention::Shape;
use crate::columns::Columns;
use crate::rope::{Direction, Positions, Table};
use crate::{Fused, Kernels};

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn rotations() {
    let (rows, seq_len, stride, first, half) = (14, 7, 80, 16, 16);
    let table = Table::new(&[0.5; 16].map(|x: f32| x * 0.9), 1.0, 0..12, &Device::Cpu).unwrap();
    let starts: Vec<u32> = (0..rows as u32).map(|row| if row % 7 > 3 { 4 } else { 0 }).collect();
    for dtype in TYPES {
        for documents in [None, Some(&starts[..])] {
            for direction in [Direction::Forward, Direction::Backward] {
                let x = pattern(rows * stride, 1, dtype);
                let positions = Positions { seq_len, past: 2, documents };
                let found = in_every_order(|gpu| {
                    let buffer = gpu.state(&x, dtype);
                    let place = Rows { buffer, len: rows, stride, first, count: 4 * half };
                    let angles = [&table.cos, &table.sin]
                        .map(|table| gpu.input(&numbers(&table.flatten_all().unwrap()), DType::F32));
                    let starts = documents.map(|starts| gpu.words(starts));
                    heads::rotate(gpu, place, angles, half, positions, starts, direction).unwrap();
                    vec![gpu.read(buffer)]
                });
                let x = tensor(&x, &[rows, stride], dtype);
                let columns = Columns::new(&x, first..first + 4 * half).unwrap();
                Fused.rotate(columns, &table, positions, direction).unwrap();
                assert_close("rotated", &found[0], &numbers(&x), dtype);
            }
        }
    }
}

#[test]
#[ignore = "needs a C++ compiler with sanitizers; .ci/run runs it"]
fn grouped_heads() {
    let shape = Shape { kv_heads: 2, ..Shape::new(1, 3, 6, 16) };
    let (rows, group) = (3, 3);
    for dtype in TYPES {
        let (qkv, gradient) = (pattern(rows * 10 * 16, 1, dtype), pattern(rows * 18 * 16, 2, dtype));
        let found = in_every_order(|gpu| {
            let (wide, back) = (gpu.output(rows * 18 * 16, dtype), gpu.output(rows * 10 * 16, dtype));
            let parts = |buffer| {
                [(0, 6), (6, 2), (8, 2)].map(|(first, heads)| {
                    let (first, count) = (first * 16, heads * 16);
                    Rows { buffer, len: rows, stride: 10 * 16, first, count }
                })
            };
            heads::spread(gpu, &shape, parts(gpu.input(&qkv, dtype)), wide).unwrap();
            heads::gather(gpu, &shape, gpu.input(&gradient, dtype), parts(back)).unwrap();
            vec![gpu.read(wide), gpu.read(back)]
        });
        let (mut wide, mut back) = (Vec::new(), Vec::new());
        for (row, gradient) in qkv.chunks(10 * 16).zip(gradient.chunks(18 * 16)) {
            let heads: Vec<&[f32]> = row.chunks(16).collect();
            wide.extend(heads[..6].concat());
            for part in [6, 8] {
                (0..6).for_each(|head| wide.extend(heads[part + head / group]));
            }
            let gradients: Vec<&[f32]> = gradient.chunks(16).collect();
            back.extend(gradients[..6].concat());
            for part in [6, 12] {
                for shared in 0..2 {
                    let of = |i: usize| (0..group).map(|g| gradients[part + shared * group + g][i]).sum::<f32>();
                    back.extend((0..16).map(of));
                }
            }
        }
        assert_eq!(found[0], wide);
        assert_close("gathered", &found[1], &rounded(back, dtype), dtype);
    }
}
