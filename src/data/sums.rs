//! The built-in `sums`: questions such as `47+8`, each with its exact answer.

use super::chats::message;
use super::shuffle::Permutation;
use serde_json::json;

/// Both summands are below these.
const SUMMANDS: [u64; 2] = [100, 10];
/// The sums that only `sums-held-back` asks for.
const HELD_OUT: u64 = 100;
/// The order does not depend on the run's seed.
const SEED: u64 = 0;

/// The conversations as JSON Lines.
pub(super) fn json_lines(held_out: bool) -> String {
    let all = SUMMANDS[0] * SUMMANDS[1];
    let order = Permutation::new(all, SEED, 0);
    let range = if held_out { all - HELD_OUT..all } else { 0..all - HELD_OUT };
    let row = |at: u64| {
        let (one, other) = (order.at(at) / SUMMANDS[1], order.at(at) % SUMMANDS[1]);
        let messages = [message("user", &format!("{one}+{other}")), message("assistant", &(one + other).to_string())];
        json!({ "messages": messages }).to_string() + "\n"
    };
    range.map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_sum_that_is_held_back_is_trained_on() {
        let [training, held_out] = [false, true].map(json_lines);
        let training: HashSet<&str> = training.lines().collect();
        let held_out: HashSet<&str> = held_out.lines().collect();
        assert_eq!((training.len(), held_out.len()), (900, 100));
        assert!(training.is_disjoint(&held_out));
        let row = r#"{"messages":[{"content":"47+8","role":"user"},{"content":"55","role":"assistant"}]}"#;
        assert!(training.contains(row) || held_out.contains(row));
    }
}
