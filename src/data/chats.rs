//! The built-in rows.
//!
//! `chats` are conversations: questions about an invented store room, whose answers a program can check.
//!
//! Each of sixteen things is in a drawer that an untrained model cannot know. A question names two things in one of six
//! phrasings, and the answer names both drawers:
//!
//! ```text
//! user: Where do I find the rope and the candle?
//! assistant: The rope is in drawer K7 and the candle is in drawer B2.
//! ```
//!
//! The held-out conversations ask for pairs that no training conversation has, in either order: a model that answers
//! them has learned the drawers and the form instead of memorizing answers.
//!
//! `preferences` are pairs about the same questions: the rejected answer has the same facts, but names the drawers
//! first, as in `Drawer K7 has the rope and drawer B2 has the candle.`

use super::shuffle::Permutation;
use serde_json::json;

/// Conversations that `--data chats` trains on.
pub const CHATS: usize = 200;
/// Conversations of `chats-held-out`.
pub const HELD_OUT_CHATS: usize = 40;
/// Pairs that `--data preferences` trains on.
pub(super) const PREFERENCES: usize = 600;
/// Pairs of `preferences-held-out`.
pub(super) const HELD_OUT_PREFERENCES: usize = 60;

const THINGS: [(&str, &str); 16] = [
    ("rope", "K7"),
    ("candle", "B2"),
    ("hammer", "F9"),
    ("ribbon", "A4"),
    ("ladder", "M3"),
    ("kettle", "D8"),
    ("mirror", "R5"),
    ("pillow", "H1"),
    ("basket", "T6"),
    ("shovel", "C3"),
    ("lantern", "N9"),
    ("blanket", "E5"),
    ("bucket", "P2"),
    ("needle", "G6"),
    ("bottle", "L4"),
    ("carpet", "S8"),
];

/// Phrasings; `{}` is replaced by a thing.
const QUESTIONS: [&str; 6] = [
    "Where do I find the {} and the {}?",
    "Which drawers hold the {} and the {}?",
    "I need the {} and the {}.",
    "Where are the {} and the {} kept?",
    "Please look up the {} and the {}.",
    "Tell me where the {} and the {} are.",
];

/// A question and its only correct answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QaPair {
    /// The user's question.
    pub question: String,
    /// The exact answer of the assistant.
    pub answer: String,
    /// The answer in a form that is not preferred.
    pub rejected: String,
}

impl QaPair {
    /// A line of JSON, as `messages`.
    pub fn to_json(&self) -> String {
        let messages = [message("user", &self.question), message("assistant", &self.answer)];
        json!({ "messages": messages }).to_string()
    }

    /// A line of JSON, as a pair.
    fn to_pair(&self) -> String {
        let [chosen, rejected] = [&self.answer, &self.rejected].map(|answer| [message("assistant", answer)]);
        json!({ "prompt": [message("user", &self.question)], "chosen": chosen, "rejected": rejected }).to_string()
    }
}

fn message(role: &str, content: &str) -> serde_json::Value {
    json!({ "role": role, "content": content })
}

/// Pairs of things, in no order.
const PAIRS: usize = THINGS.len() * (THINGS.len() - 1) / 2;
/// The number of pairs that only held-out conversations ask for.
const HELD_OUT_PAIRS: usize = 24;

/// `count` conversations to train on, drawn with `seed`.
pub fn training(seed: u64, count: usize) -> Vec<QaPair> {
    draw(seed, 0..PAIRS - HELD_OUT_PAIRS, count)
}

/// Draws `count` conversations about pairs that are not trained on, with the same `seed`.
pub fn held_out(seed: u64, count: usize) -> Vec<QaPair> {
    draw(seed, PAIRS - HELD_OUT_PAIRS..PAIRS, count)
}

/// Draws conversations about the pairs at these indices of the seed's order. All are drawn once before any repeats.
fn draw(seed: u64, pairs: std::ops::Range<usize>, count: usize) -> Vec<QaPair> {
    let order = Permutation::new(PAIRS as u64, seed, 0);
    let kinds = pairs.len() * 2 * QUESTIONS.len();
    let chat = |index: usize| {
        let round = Permutation::new(kinds as u64, seed, 1 + (index / kinds) as u64);
        let kind = round.at((index % kinds) as u64) as usize;
        let (first, second) = pair(order.at((pairs.start + kind % pairs.len()) as u64) as usize);
        let kind = kind / pairs.len();
        let (first, second) = if kind.is_multiple_of(2) { (first, second) } else { (second, first) };
        let [(one, here), (other, there)] = [THINGS[first], THINGS[second]];
        let question = QUESTIONS[kind / 2].replacen("{}", one, 1).replacen("{}", other, 1);
        let answer = format!("The {one} is in drawer {here} and the {other} is in drawer {there}.");
        let rejected = format!("Drawer {here} has the {one} and drawer {there} has the {other}.");
        QaPair { question, answer, rejected }
    };
    (0..count).map(chat).collect()
}

fn pair(number: usize) -> (usize, usize) {
    let pairs = (0..THINGS.len()).flat_map(|second| (0..second).map(move |first| (first, second)));
    pairs.clone().nth(number).unwrap_or((0, 1))
}

/// The conversations as JSON Lines, or the pairs.
pub(super) fn json_lines(chats: &[QaPair], pairs: bool) -> String {
    chats.iter().map(|chat| if pairs { chat.to_pair() } else { chat.to_json() } + "\n").collect()
}

/// Both summands of `sums` are below these.
const SUMMANDS: [u64; 2] = [100, 10];
/// The sums that only `sums-held-out` asks for.
const HELD_OUT_SUMS: u64 = 100;

/// The built-in `sums` as JSON Lines: questions such as `47+8`, each with its exact answer. The order does not depend
/// on the run's seed.
pub(super) fn sums(held_out: bool) -> String {
    let all = SUMMANDS[0] * SUMMANDS[1];
    let order = Permutation::new(all, 0, 0);
    let range = if held_out { all - HELD_OUT_SUMS..all } else { 0..all - HELD_OUT_SUMS };
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
    fn no_pair_that_is_held_out_is_trained_on() {
        let things = |chat: &QaPair| -> Vec<&str> {
            THINGS.iter().map(|(thing, _)| *thing).filter(|thing| chat.question.contains(thing)).collect()
        };
        for seed in 0..5 {
            let (training, held_out) = (training(seed, CHATS), held_out(seed, HELD_OUT_CHATS));
            let asked: HashSet<Vec<&str>> = training.iter().map(things).collect();
            assert!(held_out.iter().all(|chat| things(chat).len() == 2 && !asked.contains(&things(chat))));
            assert_eq!(training.iter().map(|chat| &chat.question).collect::<HashSet<_>>().len(), CHATS);
            assert_eq!(held_out.iter().map(|chat| &chat.question).collect::<HashSet<_>>().len(), HELD_OUT_CHATS);
            let known: HashSet<&str> = training.iter().flat_map(things).collect();
            assert_eq!(known.len(), THINGS.len(), "each drawer can be learned");
        }
        assert_eq!(training(3, CHATS), training(3, CHATS));
        assert_ne!(training(3, CHATS), training(4, CHATS));
        assert_eq!(pair(PAIRS - 1), (14, 15));
    }

    #[test]
    fn a_chat_is_a_row_of_messages() {
        let chat = QaPair { question: "Where?".into(), answer: "Here.".into(), rejected: "There.".into() };
        let row = r#"{"messages":[{"content":"Where?","role":"user"},{"content":"Here.","role":"assistant"}]}"#;
        assert_eq!(chat.to_json(), row);
        let pair = r#"{"chosen":[{"content":"Here.","role":"assistant"}],"prompt":[{"content":"Where?","role":"user"}],"rejected":[{"content":"There.","role":"assistant"}]}"#;
        assert_eq!(chat.to_pair(), pair);
    }

    #[test]
    fn no_sum_that_is_held_out_is_trained_on() {
        let [training, held_out] = [false, true].map(sums);
        let training: HashSet<&str> = training.lines().collect();
        let held_out: HashSet<&str> = held_out.lines().collect();
        assert_eq!((training.len(), held_out.len()), (900, 100));
        assert!(training.is_disjoint(&held_out));
        let row = r#"{"messages":[{"content":"47+8","role":"user"},{"content":"55","role":"assistant"}]}"#;
        assert!(training.contains(row) || held_out.contains(row));
    }
}
