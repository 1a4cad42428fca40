//! Queue of eviction requests: one at a time per node, and each carried out once, however often it is repeated.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::handler::Handler;
use super::refusal::LeaderRefusal;
use crate::clock;
use crate::crd::eviction::{ANSWER_TIMEOUT, EvictionAnswer, EvictionRequest, Key};
use crate::engine::time::BootTime;

/// Limit of requests in progress at a time; others wait.
const MAX_CONCURRENT: usize = 64;

/// Rate limit per node. An agent never has more pods to evict in that time.
const WINDOW: Duration = Duration::from_secs(10);
const MAX_IN_WINDOW: u32 = 64;
/// A request is not repeated after this time.
const HISTORY: Duration = Duration::from_mins(10);

/// A request with the channel for its answer; `None` is sent if this replica does not lead.
#[derive(Debug)]
pub struct Pending {
    /// The node whose agent sent it.
    pub node: Arc<str>,
    /// The request.
    pub request: EvictionRequest,
    /// Channel for the answer.
    pub reply: oneshot::Sender<Option<EvictionAnswer>>,
}

type Reply = oneshot::Sender<Option<EvictionAnswer>>;

/// The last request of a node.
#[derive(Debug)]
struct LastRequest {
    key: Key,
    state: State,
    /// Start of the rate limit window, and the number of requests in it.
    window: (BootTime, u32),
}

#[derive(Debug)]
enum State {
    /// In progress, with the channels waiting for the answer.
    Running(Vec<Reply>),
    Done(EvictionAnswer),
}

impl LastRequest {
    const fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// Handles a repeated request: it gets the same answer.
    fn again(&mut self, reply: Reply) -> Step {
        match &mut self.state {
            State::Running(replies) => {
                replies.push(reply);
                Step::Join
            }
            State::Done(answer) => Step::Answer(reply, answer.clone()),
        }
    }

    /// Why another request of the node is refused.
    fn refusal_of(&self, key: &Key) -> Option<LeaderRefusal> {
        if self.is_running() {
            // Most likely the agent was restarted.
            let why = "another eviction of the same node is in progress";
            return Some(LeaderRefusal::later("running", why));
        }
        let is_older = self.key.boot_id == key.boot_id && self.key > *key;
        is_older.then(LeaderRefusal::outdated)
    }
}

/// What to do with a request.
#[derive(Debug)]
enum Step {
    /// New: carry it out.
    Run,
    /// Answer it.
    Answer(Reply, EvictionAnswer),
    /// Refuse it.
    Refuse(Reply, LeaderRefusal),
    /// Already in progress: it gets the same answer.
    Join,
}

/// The last request of each node.
#[derive(Debug, Default)]
struct LastRequests(HashMap<Arc<str>, LastRequest>);

impl LastRequests {
    fn take(&mut self, node: &Arc<str>, key: &Key, reply: Reply, now: BootTime) -> Step {
        let mut window = (now, 0);
        if let Some(last) = self.0.get_mut(node) {
            if last.key == *key {
                return last.again(reply);
            }
            if let Some(refusal) = last.refusal_of(key) {
                return Step::Refuse(reply, refusal);
            }
            if now.since(last.window.0) < WINDOW {
                window = last.window;
            }
        }
        if window.1 >= MAX_IN_WINDOW {
            let why = "the node's agent requests too many evictions";
            return Step::Refuse(reply, LeaderRefusal::later("too_many", why));
        }
        let last = LastRequest {
            key: key.clone(),
            state: State::Running(vec![reply]),
            window: (window.0, window.1 + 1),
        };
        self.forget_old(now);
        self.0.insert(Arc::clone(node), last);
        Step::Run
    }

    /// Removes nodes without recent requests.
    fn forget_old(&mut self, now: BootTime) {
        let is_recent = |last: &LastRequest| now.since(last.window.0) < HISTORY;
        self.0
            .retain(|_, last| is_recent(last) || last.is_running());
    }

    /// Forgets answered requests: the next leader does not know them.
    fn forget_answered(&mut self) {
        self.0.retain(|_, last| last.is_running());
    }

    /// Stores the answer, and returns the channels waiting for it.
    fn finish(&mut self, node: &str, answer: &EvictionAnswer) -> Vec<Reply> {
        let Some(last) = self.0.get_mut(node) else {
            return Vec::new();
        };
        match std::mem::replace(&mut last.state, State::Done(answer.clone())) {
            State::Running(replies) => replies,
            State::Done(_) => Vec::new(),
        }
    }
}

/// Carries out requests.
pub struct Queue {
    handler: Arc<Handler>,
    pending: mpsc::Receiver<Pending>,
    last_requests: LastRequests,
    /// Accepted but not started, at most one per node.
    waiting: VecDeque<(Arc<str>, EvictionRequest, BootTime)>,
    running: FuturesUnordered<BoxFuture<'static, (Arc<str>, EvictionAnswer)>>,
}

impl Queue {
    /// Takes requests from `pending`.
    pub fn new(handler: Handler, pending: mpsc::Receiver<Pending>) -> Self {
        Self {
            handler: Arc::new(handler),
            pending,
            last_requests: LastRequests::default(),
            waiting: VecDeque::new(),
            running: FuturesUnordered::new(),
        }
    }

    /// Runs until all senders are dropped. A request that was started is finished even if the agent's connection is
    /// gone.
    pub async fn run(mut self) {
        loop {
            tokio::select! {
                pending = self.pending.recv() => match pending {
                    Some(pending) => self.take(pending),
                    None => return,
                },
                Some((node, answer)) = self.running.next() => self.finish(&node, &answer),
            }
            self.start_waiting();
        }
    }

    fn take(&mut self, pending: Pending) {
        let Pending {
            node,
            request,
            reply,
        } = pending;
        if !self.handler.leads() {
            self.last_requests.forget_answered();
            reply.send(None).ok();
            return;
        }
        let now = clock::boot_time();
        match self.last_requests.take(&node, &request.key, reply, now) {
            Step::Run => self
                .waiting
                .push_back((node, request, now + ANSWER_TIMEOUT)),
            Step::Answer(reply, answer) => drop(reply.send(Some(answer))),
            Step::Refuse(reply, refusal) => {
                self.handler.metrics.answered(refusal.label, Duration::ZERO);
                reply.send(Some(refusal.answer)).ok();
            }
            Step::Join => {}
        }
    }

    /// Starts waiting requests up to the limit. Those that waited too long are dropped: their agent has timed out.
    fn start_waiting(&mut self) {
        while self.running.len() < MAX_CONCURRENT
            && let Some((node, request, deadline)) = self.waiting.pop_front()
        {
            if clock::boot_time() >= deadline {
                let late = LeaderRefusal::late();
                self.handler.metrics.answered(late.label, ANSWER_TIMEOUT);
                self.finish(&node, &late.answer);
                continue;
            }
            let handler = Arc::clone(&self.handler);
            let run = async move {
                let answer = handler.evict(&node, &request, deadline).await;
                (node, answer)
            };
            self.running.push(run.boxed());
        }
    }

    fn finish(&mut self, node: &str, answer: &EvictionAnswer) {
        for reply in self.last_requests.finish(node, answer) {
            // The connection may be gone.
            reply.send(Some(answer.clone())).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(boot: &str, sequence: u64) -> Key {
        Key {
            boot_id: boot.to_owned(),
            sequence,
        }
    }

    fn take(
        last_requests: &mut LastRequests,
        key: &Key,
    ) -> (Step, oneshot::Receiver<Option<EvictionAnswer>>) {
        take_at(last_requests, key, 0)
    }

    fn take_at(
        last_requests: &mut LastRequests,
        key: &Key,
        second: u64,
    ) -> (Step, oneshot::Receiver<Option<EvictionAnswer>>) {
        let (reply, answer) = oneshot::channel();
        let now = BootTime::default() + Duration::from_secs(100 + second);
        (last_requests.take(&Arc::from("n"), key, reply, now), answer)
    }

    #[test]
    fn a_repeated_request_gets_the_same_answer_and_runs_once() {
        let mut last_requests = LastRequests::default();
        let (first, _answer) = take(&mut last_requests, &key("b", 1));
        assert!(matches!(first, Step::Run), "{first:?}");
        let (again, _answer) = take(&mut last_requests, &key("b", 1));
        assert!(matches!(again, Step::Join), "{again:?}");
        let (other, _answer) = take(&mut last_requests, &key("b", 2));
        assert!(
            matches!(&other, Step::Refuse(_, refusal) if refusal.label == "running"),
            "{other:?}"
        );
        assert_eq!(
            last_requests.finish("n", &EvictionAnswer::Accepted).len(),
            2
        );
        let (late, _answer) = take(&mut last_requests, &key("b", 1));
        assert!(
            matches!(late, Step::Answer(_, EvictionAnswer::Accepted)),
            "{late:?}"
        );
    }

    #[test]
    fn a_stolen_token_cannot_flood_the_leader() {
        let mut last_requests = LastRequests::default();
        let runs = |last_requests: &mut LastRequests, sequence, second| {
            let (step, _answer) = take_at(last_requests, &key("b", sequence), second);
            let runs = matches!(step, Step::Run);
            drop(last_requests.finish("n", &EvictionAnswer::Gone));
            runs
        };
        let taken = (0..1000).filter(|sequence| runs(&mut last_requests, *sequence, 0));
        assert_eq!(taken.count(), 64);
        assert!(!runs(&mut last_requests, 2000, 9));
        assert!(runs(&mut last_requests, 2001, 10), "another window");
    }

    #[test]
    fn older_requests_of_a_boot_are_refused_and_a_new_boot_starts_over() {
        let mut last_requests = LastRequests::default();
        drop(take(&mut last_requests, &key("b", 7)));
        drop(last_requests.finish("n", &EvictionAnswer::Gone));
        let (old, _answer) = take(&mut last_requests, &key("b", 6));
        assert!(
            matches!(&old, Step::Refuse(_, refusal) if refusal.label == "outdated"),
            "{old:?}"
        );
        let (booted, _answer) = take(&mut last_requests, &key("a", 1));
        assert!(matches!(booted, Step::Run), "{booted:?}");
    }
}
