//! The embedded queue in both dialects, on a manual clock.

use std::sync::Arc;
use std::time::Duration;

use journeyman::queue::{self, Db, QueueClock, RegisteredClient, RunningQueue};
use journeyman::source::Source;
use journeyman::source::taskcluster::{Credentials, Dialect};
use journeyman_domain::id::{Run, TaskId};

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span, Spec};
use crate::conformance::service::{Service, ServiceBench, fresh_task_queue};

// Signatures use the host's clock, so the sum must stay below the tolerated 15 minutes.
const LEASE: Duration = Duration::from_secs(60);
const HIDDEN: Duration = Duration::from_secs(30);

pub(crate) fn adapter(dialect: Dialect) -> Adapter {
    Adapter::Present { rigs: vec![Box::new(Embedded { dialect })] }
}

struct Embedded {
    dialect: Dialect,
}

impl Rig for Embedded {
    fn name(&self) -> String {
        match self.dialect {
            Dialect::Azure => "embedded queue, azure".into(),
            Dialect::ClaimWork => "embedded queue, claim-work".into(),
        }
    }

    fn can(&self, need: Need) -> bool {
        let azure = self.dialect == Dialect::Azure;
        match need {
            Need::Claims | Need::History | Need::LeaseEnd | Need::Artifacts | Need::Links => true,
            Need::Messages | Need::Redelivery => azure,
            Need::Waits | Need::Recovery => !azure,
            Need::Garbage => false,
        }
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let dialect = self.dialect;
        Box::pin(async move {
            let folder = tempfile::tempdir().expect("a folder can be made");
            let clock = QueueClock::manual(jiff::Timestamp::now().as_millisecond());
            let mut settings = queue::Config::new(Db::Memory, folder.path().join("artifacts"));
            let token = "conformance-token";
            let scopes = vec!["*".to_owned()];
            settings.clients =
                vec![RegisteredClient { client_id: "conformance".into(), access_token: token.into(), scopes }];
            settings.claim_timeout = LEASE;
            settings.claim_delay = Duration::ZERO;
            settings.visibility_timeout = HIDDEN;
            settings.clock = clock.clone();
            let running = queue::start(settings).await.expect("the queue starts");
            let service = Service {
                root_url: running.root_url().to_owned(),
                credentials: Credentials::new("conformance", token.into(), None).expect("they can sign"),
                dialect,
            };
            let inner = service.bench(fresh_task_queue());
            Arc::new(EmbeddedBench { inner, running, clock, _folder: folder }) as Arc<dyn Bench>
        })
    }
}

struct EmbeddedBench {
    inner: ServiceBench,
    running: RunningQueue,
    clock: QueueClock,
    _folder: tempfile::TempDir,
}

impl Bench for EmbeddedBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        self.inner.source(worker)
    }

    fn create(&self, spec: Spec) -> Fut<'_, TaskId> {
        self.inner.create(spec)
    }

    fn cancel<'a>(&'a self, task: &'a TaskId) -> Fut<'a, ()> {
        self.inner.cancel(task)
    }

    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        self.inner.states(task)
    }

    fn artifact<'a>(&'a self, run: &'a Run, name: &'a str) -> Fut<'a, Vec<u8>> {
        self.inner.artifact(run, name)
    }

    fn garbage(&self) -> Fut<'_, ()> {
        self.inner.garbage()
    }

    fn pass(&self, span: Span) -> Fut<'_, ()> {
        let span = match span {
            Span::MostOfALease => LEASE * 2 / 3,
            Span::ALease => LEASE + Duration::from_secs(1),
            Span::AHiding => HIDDEN + Duration::from_secs(1),
        };
        self.clock.advance(span);
        Box::pin(self.running.tick())
    }
}
