//! The result of the demo.

use anyhow::Result;
use serde_json::json;
use waljet_testbed::Books;

use crate::render::data;

/// The books, and what was done to upset them.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Committed against stored.
    pub(crate) books: Books,
    /// Transactions that the service knows to be committed.
    pub(crate) transactions: u64,
    /// Transactions that were rolled back.
    pub(crate) rolled_back: u64,
    /// Transactions with a savepoint that was rolled back.
    pub(crate) savepoints: u64,
    /// Rows of the largest transaction.
    pub(crate) largest_transaction: u32,
    /// What was killed, once each.
    pub(crate) kills: [&'static str; 3],
    /// How long the clean stop took.
    pub(crate) stop_seconds: f64,
    /// How long the demo took.
    pub(crate) seconds: f64,
}

impl Report {
    /// Writes the result to standard output.
    pub(crate) fn print(&self, as_json: bool) -> Result<()> {
        let text = if as_json { self.json() } else { self.table() };
        data(&text).map_err(|failure| anyhow::anyhow!("write the result: {failure:?}"))
    }

    fn json(&self) -> String {
        let Books { committed, stored, lost, doubled, reordered, foreign, .. } = self.books;
        let value = json!({
            "committed": committed, "stored": stored,
            "lost": lost, "doubled": doubled, "reordered": reordered, "foreign": foreign,
            "transactions": self.transactions, "rolled_back": self.rolled_back, "savepoints": self.savepoints,
            "largest_transaction": self.largest_transaction, "killed": self.kills,
            "stop_seconds": self.stop_seconds, "seconds": self.seconds,
        });
        format!("{value}\n")
    }

    fn table(&self) -> String {
        let Books { committed, stored, lost, doubled, reordered, foreign, .. } = self.books;
        let verdict = if self.books.balanced() { "The books balance." } else { "THE BOOKS DO NOT BALANCE." };
        let killed = self.kills.join(", ");
        format!(
            "\n  committed  {committed:>9}   events in the outbox table, in {} transactions\n  \
             stored     {stored:>9}   messages in the stream\n  \
             lost       {lost:>9}\n  \
             doubled    {doubled:>9}\n  \
             reordered  {reordered:>9}\n  \
             foreign    {foreign:>9}   of {} rolled back transactions and {} savepoints\n\n  \
             killed on the way: {killed}; stopped cleanly in {:.1} s; largest transaction {} rows; {:.0} s in all\n  \
             {verdict}\n",
            self.transactions,
            self.rolled_back,
            self.savepoints,
            self.stop_seconds,
            self.largest_transaction,
            self.seconds,
        )
    }
}
