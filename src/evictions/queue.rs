//! Requests of all nodes: one at a time of each, and each done once however often it comes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::handler::Handler;
use super::refusal::Refusal;
use crate::cluster::clock;
use crate::crd::eviction::{ANSWER_TIMEOUT, Answer, EvictionRequest, Key};
use crate::engine::time::BootTime;

/// So many are carried out at a time; others wait.
const MAX_AT_ONCE: usize = 64;

/// No more requests of one node are taken in so long; an agent has no more pods to ask for at a time.
const WINDOW: Duration = Duration::from_secs(10);
const MAX_IN_WINDOW: u32 = 64;
/// A request does not come again after so long.
const REMEMBERED: Duration = Duration::from_mins(10);

/// A request, and where its answer goes; `None`: this replica does not lead.
#[derive(Debug)]
pub struct Pending {
    /// The node whose agent asks.
    pub node: Arc<str>,
    /// What it asks for.
    pub request: EvictionRequest,
    /// The answer.
    pub reply: oneshot::Sender<Option<Answer>>,
}

type Reply = oneshot::Sender<Option<Answer>>;

/// The last request of a node.
#[derive(Debug)]
struct Last {
    key: Key,
    state: State,
    /// When the window began, and how many requests were taken in it.
    window: (BootTime, u32),
}

#[derive(Debug)]
enum State {
    /// It is being carried out; these wait for the answer.
    Running(Vec<Reply>),
    Done(Answer),
}

impl Last {
    const fn is_running(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// The same request again: it gets the same answer.
    fn again(&mut self, reply: Reply) -> Step {
        match &mut self.state {
            State::Running(replies) => {
                replies.push(reply);
                Step::Join
            }
            State::Done(answer) => Step::Answer(reply, answer.clone()),
        }
    }

    /// Why another request of the node is not carried out.
    fn refusal_of(&self, key: &Key) -> Option<Refusal> {
        if self.is_running() {
            // Its agent was restarted meanwhile, most likely.
            let why = "another eviction of the same node is under way";
            return Some(Refusal::later("running", why));
        }
        let is_older = self.key.boot_id == key.boot_id && self.key > *key;
        is_older.then(Refusal::outdated)
    }
}

/// What is to be done with a request.
#[derive(Debug)]
enum Step {
    /// It is new: carry it out.
    Run,
    /// Answer it so.
    Answer(Reply, Answer),
    /// Refuse it.
    Refuse(Reply, Refusal),
    /// It is answered with the one that is under way.
    Join,
}

/// The last request of each node.
#[derive(Debug, Default)]
struct Lasts(HashMap<Arc<str>, Last>);

impl Lasts {
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
            let why = "the node's agent asks for too many evictions";
            return Step::Refuse(reply, Refusal::later("too_many", why));
        }
        let last = Last {
            key: key.clone(),
            state: State::Running(vec![reply]),
            window: (window.0, window.1 + 1),
        };
        self.forget_old(now);
        self.0.insert(Arc::clone(node), last);
        Step::Run
    }

    /// Nodes come and go.
    fn forget_old(&mut self, now: BootTime) {
        let is_recent = |last: &Last| now.since(last.window.0) < REMEMBERED;
        self.0
            .retain(|_, last| is_recent(last) || last.is_running());
    }

    /// The next leader knows nothing of requests that were answered here.
    fn forget_answered(&mut self) {
        self.0.retain(|_, last| last.is_running());
    }

    /// Takes in the answer, and returns who waits for it.
    fn done(&mut self, node: &str, answer: &Answer) -> Vec<Reply> {
        let Some(last) = self.0.get_mut(node) else {
            return Vec::new();
        };
        match std::mem::replace(&mut last.state, State::Done(answer.clone())) {
            State::Running(replies) => replies,
            State::Done(_) => Vec::new(),
        }
    }
}

/// Carries requests out.
pub struct Queue {
    handler: Arc<Handler>,
    pending: mpsc::Receiver<Pending>,
    lasts: Lasts,
    /// Accepted, and not begun: at most one of each node.
    waiting: VecDeque<(Arc<str>, EvictionRequest, BootTime)>,
    running: FuturesUnordered<BoxFuture<'static, (Arc<str>, Answer)>>,
}

impl Queue {
    /// Those that come by `pending`.
    pub fn new(handler: Handler, pending: mpsc::Receiver<Pending>) -> Self {
        Self {
            handler: Arc::new(handler),
            pending,
            lasts: Lasts::default(),
            waiting: VecDeque::new(),
            running: FuturesUnordered::new(),
        }
    }

    /// Runs until no listener is left. What was begun is finished, also where the connection of its agent is gone.
    pub async fn run(mut self) {
        loop {
            tokio::select! {
                pending = self.pending.recv() => match pending {
                    Some(pending) => self.take(pending),
                    None => return,
                },
                Some((node, answer)) = self.running.next() => self.done(&node, &answer),
            }
            self.begin();
        }
    }

    fn take(&mut self, pending: Pending) {
        let Pending {
            node,
            request,
            reply,
        } = pending;
        if !self.handler.leads() {
            self.lasts.forget_answered();
            reply.send(None).ok();
            return;
        }
        let now = clock::now();
        match self.lasts.take(&node, &request.key, reply, now) {
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

    /// Begins what waits, as many as may run at a time. What came too long ago is not done any more: its agent has given up.
    fn begin(&mut self) {
        while self.running.len() < MAX_AT_ONCE
            && let Some((node, request, deadline)) = self.waiting.pop_front()
        {
            if clock::now() >= deadline {
                let late = Refusal::late();
                self.handler.metrics.answered(late.label, ANSWER_TIMEOUT);
                self.done(&node, &late.answer);
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

    fn done(&mut self, node: &str, answer: &Answer) {
        for reply in self.lasts.done(node, answer) {
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

    fn take(lasts: &mut Lasts, key: &Key) -> (Step, oneshot::Receiver<Option<Answer>>) {
        take_at(lasts, key, 0)
    }

    fn take_at(
        lasts: &mut Lasts,
        key: &Key,
        second: u64,
    ) -> (Step, oneshot::Receiver<Option<Answer>>) {
        let (reply, answer) = oneshot::channel();
        let now = BootTime::default() + Duration::from_secs(100 + second);
        (lasts.take(&Arc::from("n"), key, reply, now), answer)
    }

    #[test]
    fn a_request_that_comes_again_is_answered_the_same_and_done_once() {
        let mut lasts = Lasts::default();
        let (first, _answer) = take(&mut lasts, &key("b", 1));
        assert!(matches!(first, Step::Run), "{first:?}");
        let (again, _answer) = take(&mut lasts, &key("b", 1));
        assert!(matches!(again, Step::Join), "{again:?}");
        let (other, _answer) = take(&mut lasts, &key("b", 2));
        assert!(
            matches!(&other, Step::Refuse(_, refusal) if refusal.label == "running"),
            "{other:?}"
        );
        assert_eq!(lasts.done("n", &Answer::Accepted).len(), 2);
        let (late, _answer) = take(&mut lasts, &key("b", 1));
        assert!(
            matches!(late, Step::Answer(_, Answer::Accepted)),
            "{late:?}"
        );
    }

    #[test]
    fn a_thief_of_a_token_does_not_keep_the_leader_busy() {
        let mut lasts = Lasts::default();
        let runs = |lasts: &mut Lasts, sequence, second| {
            let (step, _answer) = take_at(lasts, &key("b", sequence), second);
            let runs = matches!(step, Step::Run);
            drop(lasts.done("n", &Answer::Gone));
            runs
        };
        let taken = (0..1000).filter(|sequence| runs(&mut lasts, *sequence, 0));
        assert_eq!(taken.count(), 64);
        assert!(!runs(&mut lasts, 2000, 9));
        assert!(runs(&mut lasts, 2001, 10), "another window");
    }

    #[test]
    fn what_is_older_than_the_last_of_the_boot_is_refused_and_a_new_boot_begins_again() {
        let mut lasts = Lasts::default();
        drop(take(&mut lasts, &key("b", 7)));
        drop(lasts.done("n", &Answer::Gone));
        let (old, _answer) = take(&mut lasts, &key("b", 6));
        assert!(
            matches!(&old, Step::Refuse(_, refusal) if refusal.label == "outdated"),
            "{old:?}"
        );
        let (booted, _answer) = take(&mut lasts, &key("a", 1));
        assert!(matches!(booted, Step::Run), "{booted:?}");
    }
}
