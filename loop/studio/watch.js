// What the server tells all browsers that watch the same (live.py): the state of a run, points of
// its curves, rows of a grid. A tab that is hidden watches nothing.
export default {
  props: { address: String, drawn: Array, state: Object },
  template: `<div>
    <div class="error" role="alert" v-if="error">{{ error }}</div>
    <div class="card" v-if="now">
      <div class="bar"><span :class="'status ' + now.status">{{ now.status }}</span>
        <span class="soft" v-for="job in now.jobs">{{ job }}</span></div>
      <dl><div v-for="[name, value] in now.facts"><dt>{{ name }}</dt><dd>{{ value }}</dd></div></dl>
      <pre v-if="now.error">{{ now.error }}</pre>
      <div class="soft" v-if="now.note">{{ now.note }}</div>
    </div></div>`,
  data() {
    return { error: "", now: this.state };
  },
  watch: {
    address() {
      this.look();
    },
    drawn() {
      this.asked = false;
    },
  },
  mounted() {
    this.points = {};
    this.pause = 1000;
    document.addEventListener("visibilitychange", this.look);
    this.look();
  },
  unmounted() {
    document.removeEventListener("visibilitychange", this.look);
    this.leave();
  },
  methods: {
    look() {
      if (document.hidden) this.leave();
      else if (this.address && !this.socket) this.follow();
    },
    leave() {
      clearTimeout(this.timer);
      const socket = this.socket;
      this.socket = null;
      socket?.close();
    },
    follow() {
      clearTimeout(this.timer);
      const socket = new WebSocket(location.origin.replace(/^http/, "ws") + this.address);
      this.socket = socket;
      socket.onmessage = (event) => {
        this.pause = 1000;
        if (this.socket === socket) this.take(JSON.parse(event.data));
      };
      socket.onclose = () => {
        if (this.socket !== socket) return;
        this.socket = null;
        this.timer = setTimeout(this.look, this.pause);
        this.pause = Math.min(2 * this.pause, 30000);
      };
    },
    take(told) {
      this.error = told.error || "";
      if (told.state) this.now = told.state;
      if (told.points) this.add(told.points, told.whole);
      if (told.rows) this.fill(told.rows);
    },
    add(points, whole) {
      for (const [name, more] of Object.entries(points)) {
        const before = (!whole && this.points[name]) || [];
        const is_sorted = !before.length || !more.length || before.at(-1)[0] < more[0][0];
        this.points[name] = before.concat(more);
        if (!is_sorted) this.points[name].sort((a, b) => a[0] - b[0]);
      }
      if (Object.keys(this.points).some((name) => !this.drawn.includes(name))) this.redraw();
      else this.draw(Object.keys(points));
    },
    redraw() {
      if (!this.asked) this.$emit("redraw");
      this.asked = true;
    },
    draw(names) {
      for (const section of document.querySelectorAll(".chart")) {
        const at = getElement(+section.querySelector(".nicegui-echart").id.slice(1));
        if (!at?.chart) return setTimeout(() => this.draw(names), 50); // it is being mounted
        const series = at.options.series.map(({ name, data }) => {
          const points = this.points[name];
          const is_new = names.includes(name) && JSON.stringify(points) !== JSON.stringify(data);
          return is_new ? { name, data: points, showSymbol: points.length < 3 } : { name };
        });
        // not where nothing is new: ECharts forgets which point is pointed at
        if (series.some((one) => one.data)) at.chart.setOption({ series });
      }
    },
    fill(rows) {
      if (rows.length !== this.drawn.length) return this.redraw();
      const grid = document.querySelector("main .nicegui-aggrid");
      getElement(+grid.id.slice(1)).api.setGridOption("rowData", rows);
    },
  },
};
